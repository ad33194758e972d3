"""What a comparison says first: winners and costs, from levels that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from harness.compare.verdict import verdict

Cost = tuple[float, float] | None  # seconds, MB


def level(loss: float, meaning: str = "some", **reached: Cost) -> dict[str, Any]:
    points = {
        name: None if cost is None else {"seconds": cost[0], "peak_bytes": int(cost[1] * 1e6)}
        for name, cost in reached.items()
    }
    return {"loss": loss, "meaning": meaning, "reached": points}


HALF = level(3.0, "50% of the way", mebp=(1500.0, 90.0), mezo=(30_000.0, 70.0))
MEZO_FIRST = level(4.0, mebp=(900.0, 90.0), mezo=(600.0, 70.0))
FAR = level(2.0, "best of mebp", mebp=(2000.0, 90.0), mezo=None)
TARGET = level(1.5, "the target", mebp=None, mezo=None)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "No method fell below the loss before training."),
        (
            [HALF, FAR],
            "mebp was first at every level. The lowest level that all reached, a loss of 3.0000 "
            "(50% of the way), took mebp 1,500.0 s and 90.0 MB; mezo 30,000.0 s and 70.0 MB, 20 "
            "times as long. Only mebp went on, to a loss of 2.0000 (best of mebp): 2,000.0 s and "
            "90.0 MB.",
        ),
        (
            [MEZO_FIRST, TARGET],
            "mezo was first at every level. The lowest level that all reached, a loss of 4.0000 "
            "(some), took mezo 600.0 s and 70.0 MB; mebp 900.0 s and 90.0 MB, 1.5 times as long. "
            "No method reached a loss of 1.5000 (the target).",
        ),
        (
            [FAR],
            "mebp was first at every level. Only mebp came to a loss of 2.0000 (best of mebp): "
            "2,000.0 s and 90.0 MB.",
        ),
        ([TARGET], "No method reached a loss of 1.5000 (the target)."),
    ],
)
def test_the_whole_verdict(levels: list[dict[str, Any]], said: str) -> None:
    assert verdict(levels) == said


def test_winners_are_counted_where_they_differ() -> None:
    assert verdict([MEZO_FIRST, HALF, FAR]).startswith(
        "mebp was first at 2 of 3 levels, mezo at 1. The lowest level that all reached, a loss of "
        "3.0000"
    )


def test_one_method_is_compared_with_nothing() -> None:
    near, far = level(3.0, mezo=(5.0, 70.0)), level(1.5, "the target", mezo=None)
    assert verdict([near]) == "mezo came to a loss of 3.0000 (some): 5.0 s and 70.0 MB."
    assert verdict([near, far]).endswith("It did not reach a loss of 1.5000 (the target).")
    assert verdict([far]) == "It did not reach a loss of 1.5000 (the target)."


def test_a_level_that_was_reached_before_training_has_no_ratio() -> None:
    """Two plans may differ in the last bits of the loss before training."""
    said = verdict([level(4.9999999, mebp=(10.0, 90.0), mezo=(0.0, 70.0))])
    assert "took mezo 0.0 s and 70.0 MB; mebp 10.0 s and 90.0 MB." in said
