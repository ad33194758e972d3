"""The length of a run: steps that epochs are, and the epochs that steps are."""

from __future__ import annotations

from typing import Any, cast

import pytest

from harness.config.compare import search_of
from runtime.config.methods import METHODS
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.core.notes import silent
from runtime.data.samples import Samples
from runtime.run.schedule import epochs_of, settled


def of(count: int) -> Samples:
    return cast(Samples, range(count))  # of which only the number matters


@pytest.mark.parametrize(
    ("count", "options", "steps", "said"),
    [
        (146, {"batch_size": 4}, 110, "3 epochs of 146 rows in batches of 4 = 110 steps"),
        (100, {"epochs": 0.07}, 7, "0.07 epochs of 100 rows in batches of 1 = 7 steps"),
        (7, {"epochs": 1e-6}, 1, "0.000001 epochs of 7 rows in batches of 1 = 1 step"),
        (
            10,
            {"epochs": 1, "batch_size": 2, "grad_accumulation": 2, "pack": True},
            3,
            "1 epoch of 10 packed sequences in batches of 2, 2 a step, = 3 steps",
        ),
        (146, {"steps": 100}, 100, "100 steps in batches of 1 = 0.685 epochs of 146 rows"),
        (1, {"steps": 5000}, 5000, "5000 steps in batches of 1 = 5,000 epochs of 1 row"),
        (10, {"method": "mezo"}, 1000, "1000 steps in batches of 1 = 100 epochs of 10 rows"),
        (65536, {"data": "random:0"}, 100, ""),
        (65536, {"data": "random:0", "steps": 7}, 7, ""),
    ],
)
def test_epochs_are_steps_and_steps_are_epochs(
    count: int, options: dict[str, Any], steps: int, said: str
) -> None:
    given: dict[str, Any] = {"bundle": "b", "data": "d", "batch_size": 1, **options}
    notes: list[str] = []
    config = settled(TrainConfig(**given), of(count), notes.append)
    assert (config.steps, config.epochs, "".join(notes)) == (steps, None, said)
    size = config.batch_size * config.grad_accumulation
    assert epochs_of(config, of(count), steps) == (steps * size / count if said else None)


@pytest.mark.parametrize(
    ("options", "rate"),
    [({}, 2e-4), ({"method": "one-point"}, 1e-6), ({"method": "mezo", "learning_rate": 0.5}, 0.5)],
)
def test_each_method_has_its_own_rate(options: dict[str, Any], rate: float) -> None:
    config = TrainConfig(bundle="b", data="d", **options)
    assert config.highest_rate == rate == settled(config, of(3), silent).learning_rate


def test_usual_rates_are_the_middle_of_what_comparisons_try() -> None:
    for name in METHODS.keys() - {"mebp"}:
        assert METHODS[name].learning_rate == search_of(name).values["learning_rate"][1]


def test_what_cannot_be_is_refused() -> None:
    def length(**options: Any) -> None:
        settled(TrainConfig(bundle="b", **options), of(3), print)

    with pytest.raises(UsageError, match=r"--epochs 2: random:0 has no end.*give --steps"):
        length(data="random:0", epochs=2)
    with pytest.raises(UsageError, match="warmup_steps 10 > steps 9"):
        length(data="d", warmup_steps=10)
