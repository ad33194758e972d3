"""A sweep by successive halving; comparisons in which every method gets the same amount."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bundles import Tiny
from support.comparisons import Runs, by_rate, entry, evaluation, settings
from support.exchange import NEEDS_MPI
from support.runs import here, refuses, succeeds
from support.token_rows import after, write_rows

from harness.compare.compare import compare
from harness.compare.lengths import (
    evaluated_every,
    first_passes,
    passes_of_step,
    step_limit,
    sweep_steps,
)
from harness.compare.report import to_text
from harness.measure import training
from harness.measure.training import measure_training
from harness.report.curve import read_curve
from runtime.config.methods import METHODS
from runtime.core.errors import DivergedError, InterruptedRunError, UsageError

RATES = {1e-5: (4.5, 4.4, 4.3), 2e-5: (4.4, 4.0, 3.9), 3e-5: (4.3, 4.1, 3.0), 4e-5: (4.6, 1, 1)}


class Swept:
    """Trials whose loss depends on how far they went: after 10, 20 and 40 steps."""

    def __init__(self, spoilt: float = 0.0, killed: int = -1) -> None:
        self.spoilt, self.killed = spoilt, killed
        self.made: list[tuple[float, int]] = []

    def __call__(self, settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        steps, rate = settings["steps"], settings["learning_rate"]
        kept = run / "steps"
        if not kept.exists() or int(kept.read_text()) < steps:
            if len(self.made) == self.killed:
                raise InterruptedRunError("SIGTERM")
            self.made.append((rate, steps))
            if rate == self.spoilt and steps > 10:
                raise DivergedError("the loss of step 13 is nan")
            run.mkdir(parents=True, exist_ok=True)
            (run / "config.toml").touch()
            lines = [json.dumps(entry(step + 1)) + "\n" for step in range(steps)]
            (run / "metrics.jsonl").write_text("".join(lines))
            losses = dict(zip((10, 20, 40), RATES[rate], strict=True))
            found = {str(at): evaluation(loss) for at, loss in losses.items() if at < steps}
            end = evaluation(losses.get(steps, 2.0))
            (run / "evaluations.json").write_text(
                json.dumps({"before": evaluation(5.0), **found, "after": end})
            )
            kept.write_text(str(steps))
        return {"stopped": "steps"}


def swept(tmp_path: Path, measure: Swept) -> dict[str, Any]:
    given = settings(
        tmp_path,
        methods="mezo",
        sweep_steps="10",
        steps="100",
        learning_rates=":".join(map(str, RATES)),
    )
    return compare(given, id, measure)


def test_the_better_half_goes_on_for_twice_as_many_steps(tmp_path: Path) -> None:
    measure = Swept()
    report = swept(tmp_path, measure)
    assert measure.made[:6] == [
        (1e-5, 10), (2e-5, 10), (3e-5, 10), (4e-5, 10), (2e-5, 20), (3e-5, 20)
    ]  # fmt: skip
    sweep = report["sweep"]["mezo"]
    assert sweep["rounds"] == [10, 20]
    # 4e-5 would have been the best; 3e-5 was, before it went on
    assert [(one["steps"], one["loss"]) for one in sweep["tried"]] == [
        (10, 4.5), (20, 4.0), (20, 4.1), (10, 4.6)
    ]  # fmt: skip
    assert report["methods"]["mezo"]["trial"]["values"]["learning_rate"] == 2e-5
    assert "the better half went on" in to_text(report)


@pytest.mark.parametrize("spoilt", [0.0, 2e-5, 3e-5])
def test_an_interrupted_sweep_ends_as_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: float
) -> None:
    """Also where a trial has gone further, or diverged later, than the round that is looked at."""
    monkeypatch.setattr("harness.compare.compare.write_report", lambda report, place: None)
    (tmp_path / "a").mkdir()
    whole = Swept(spoilt)
    expected = swept(tmp_path / "a", whole)
    for killed in range(1, len(whole.made)):
        place = tmp_path / f"b{killed}"
        place.mkdir()
        with pytest.raises(InterruptedRunError):
            swept(place, first := Swept(spoilt, killed))
        found = swept(place, second := Swept(spoilt))
        assert first.made + second.made == whole.made
        for key in ("sweep", "methods", "levels", "verdict"):
            assert found[key] == expected[key]
    chosen = expected["methods"]["mezo"]["trial"]["values"]["learning_rate"]
    assert chosen == (3e-5 if spoilt == 2e-5 else 2e-5)


@pytest.mark.usefixtures("forked")
def test_a_run_that_goes_on_is_the_longer_run(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("qwen2", seq_lens=(16,), device="auto").path
    common = {
        "lr_schedule": "constant",
        "bundle": str(bundle), "data": "random:3", "method": "mezo", "max_seq_length": 16,
        "budget": "200MB", "eval_data": "random:4", "eval_rows": 1,
    }  # fmt: skip
    longer = measure_training({**common, "steps": 4}, tmp_path / "whole")
    assert measure_training({**common, "steps": 2}, tmp_path / "run")["steps"] == 2
    assert measure_training({**common, "steps": 4}, tmp_path / "run")["steps"] == 4
    assert measure_training({**common, "steps": 2}, tmp_path / "run")["steps"] == 4  # as it is
    names = ("adapters.safetensors", "trajectory.jsonl")
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    points = read_curve(tmp_path / "run", 3).points
    assert [(point.step, point.forward_passes) for point in points] == [(0, 0), (2, 12), (4, 24)]
    assert points[-1].loss == read_curve(tmp_path / "whole").points[-1].loss
    assert longer["steps"] == 4
    with pytest.raises(UsageError, match="other settings: seed 0 "):
        measure_training({**common, "steps": 9, "seed": 5}, tmp_path / "run")


@NEEDS_MPI
def test_mpirun_starts_the_processes_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run, and one that goes on; that of one process is started as it is."""
    run, made = tmp_path / "run", list[tuple[list[str], list[str]]]()

    def started(*words: str, launcher: Sequence[str]) -> str:
        made.append(([word for word in words if "parallel" in word], [*launcher]))
        run.mkdir(exist_ok=True)
        (run / "config.toml").write_text('seed = 1\nsteps = 2\nmethod = "mezo"\n')
        (run / "summary.json").write_text('{"stopped": "steps", "steps": 2}')
        return ""

    monkeypatch.setattr(training, "ondevice", started)
    for steps in (2, 2, 4):
        several = {"seed": 1, "steps": steps, "parallel": "data=3"}
        measure_training(several if made else {"bundle": "b", **several}, run)
    measure_training({"seed": 1, "steps": 4}, run)
    (shared, launcher), again, (alone, plainly) = made
    assert shared == ["--parallel=data=3"] and launcher[0] == "mpirun"
    assert launcher[-2:] == ["-n", "3"] and again == made[0]
    assert alone == plainly == []


@NEEDS_MPI
@pytest.mark.slow
def test_processes_share_the_trainings_of_a_comparison(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("qwen2", seq_lens=(16,), device="auto").path
    words = ["compare", bundle, "--data=random:3", "--eval-data=random:4", "--methods=mezo"]
    words += ["--steps=4", "--eval-every=2", "--learning-rates=1e-3", "--batch-size=2"]
    words += ["--max-seq-length=16", "--budget=200MB", "--epsilons=1e-3"]
    for folder, more in (("one", []), ("two", ["--parallel=data=2"])):
        succeeds(*words, "-o", tmp_path / folder, *more)
    logs = [tmp_path / folder / "runs" / "mezo" / "trajectory.jsonl" for folder in ("one", "two")]
    assert logs[0].read_bytes() == logs[1].read_bytes()
    summary = json.loads((tmp_path / "two" / "runs" / "mezo" / "summary.json").read_text())
    assert len(summary["worker_peak_bytes"]) == 2


def test_every_method_gets_the_same_forward_passes(tmp_path: Path) -> None:
    given = settings(
        tmp_path, methods=",".join(METHODS), steps=None, eval_every=None, batch_size=2,
        equal="forward-passes", max_forward_passes=7200,
    )  # fmt: skip
    assert {method: passes_of_step(given, method) for method in METHODS} == {
        "mebp": 6, "mezo": 4, "fzoo": 18, "kzoo": 16, "one-point": 2, "hizoo": 6,
        "zo-act": 4,
    }  # fmt: skip
    for method in METHODS:
        steps = 7200 // passes_of_step(given, method)
        before = first_passes(given, method)
        assert step_limit(given, method) == steps - -(-before // passes_of_step(given, method))
        assert evaluated_every(given, method) == -(-steps // 20)
        assert sweep_steps(given, method, 3) == [steps // 8, steps // 8 * 2]
        assert sweep_steps(given, method, 8)[-1] == steps // 16 * 4
        assert sweep_steps(given, method, 2) == [steps // 4]
    queries = settings(tmp_path, steps=None, max_forward_passes=100, queries=5)
    assert step_limit(queries, "mezo") == 10 and step_limit(queries, "mebp") == 33
    both = settings(tmp_path, steps="7", max_forward_passes=100)
    assert step_limit(both, "mezo") == 7


def test_passes_before_the_first_step_count(tmp_path: Path) -> None:
    """Of zo-act's two hidden states for each of 2 rows, each row has 4 iterations and a pass."""
    given = settings(
        tmp_path, methods="mezo,zo-act", steps=None, batch_size=2, learning_rates="1e-6",
        equal="forward-passes", max_forward_passes=60, queries=2,
    )  # fmt: skip
    assert first_passes(given, "mezo") == 0
    assert first_passes(given, "zo-act") == 8 * 5
    assert step_limit(given, "mezo") == 7
    assert step_limit(given, "zo-act") == 2
    report = compare(given, id, Runs(by_rate))
    points = report["methods"]["zo-act"]["curve"]["points"]
    assert [point["forward_passes"] for point in points] == [40, 42]  # made up: one a step
    assert report["methods"]["mezo"]["curve"]["points"][0]["forward_passes"] == 0


def test_a_basis_of_few_rows_counts_those(tmp_path: Path) -> None:
    """A run's folder is enough: its settings and rows say what its method took."""
    given = settings(tmp_path, methods="zo-act", batch_size=2)
    write_rows(tmp_path / "train.tokens", [after([1, 2, 3])] * 3)
    assert first_passes(given, "zo-act", tmp_path) == 3 * 5  # not 4 rows
    assert first_passes(given, "zo-act", tmp_path / "random") == 4 * 5
    assert first_passes(given, "mezo", tmp_path) == 0


def test_methods_are_judged_by_what_is_equal(tmp_path: Path) -> None:
    given = settings(
        tmp_path, steps=None, eval_every="2", learning_rates="1e-4",
        equal="forward-passes", max_forward_passes=12,
    )  # fmt: skip
    report = compare(given, id, Runs(by_rate))
    assert {name: one["steps"] for name, one in report["methods"].items()} == {"mebp": 4, "mezo": 6}
    text = to_text(report)
    assert "forward passes and" in report["verdict"] and " times as many" in report["verdict"]
    assert "A row of mebp counts as 3" in text and "judged by forward passes" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"equal": "seconds"}, "equal is seconds, but max_seconds does not say how many"),
        ({"equal": "forward-passes", "max_seconds": 5.0}, "max_forward_passes does not say how"),
        (
            {"equal": "forward-passes", "max_forward_passes": 5, "max_seconds": 5.0},
            "max_seconds would give the methods other amounts",
        ),
        (
            {"equal": "seconds", "max_seconds": 5.0, "steps": "5"},
            "steps would give the methods other amounts",
        ),
        ({"equal": "steps", "max_seconds": 5.0}, "equal"),
    ],
)
def test_what_would_not_be_equal_is_refused(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        settings(tmp_path, **{"steps": None, **more})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods=mezo,fzoo", "--steps=3", "--queries=1"], "--queries 1 is too few for fzoo"),
        (["--methods=mezo,mebp", "--steps=3", "--trainable=full"], "quantized"),
        (["--methods=mezo,fzoo", "--max-forward-passes=5"], "5 < 9, those of one step of fzoo"),
        (["--methods=zo-act", "--max-forward-passes=9"], "9 < 12, those of one step of zo-act and"),
    ],
)
def test_what_a_later_method_cannot_do_is_said_before_the_first_runs(
    tiny: Tiny, tmp_path: Path, options: list[str], said: str
) -> None:
    bundle = tiny("qwen2", seq_lens=(16,), device="auto").path
    words = ["compare", bundle, "--data=random:3", "--eval-data=random:4", "-o", tmp_path / "out"]
    refuses(2, said, *words, "--budget=200MB", "--max-seq-length=16", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("forked")
def test_full_bundles_are_compared_without_adapters(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("qwen2", seq_lens=(16,), trainable="full", storage="bfloat16").path
    words = ["compare", bundle, "--data=random:3", "--eval-data=random:4", "-o", tmp_path / "out"]
    common = ["--budget=200MB", "--max-seq-length=16", "--eval-rows=1", "--methods=mezo"]
    succeeds(*words, *common, "--learning-rates=1e-6", "--max-forward-passes=8", by=here)
    config = (tmp_path / "out" / "runs" / "mezo" / "config.toml").read_text()
    assert 'trainable = "full"' in config
    refused = here(*words[:-1], tmp_path / "no", *common, "--steps=3", "--methods=mezo,mebp")
    assert refused.returncode == 2 and "mebp trains adapters only" in refused.stderr


class Spoils(Runs):
    """Runs, but not sweeps, at rates above `limit` end far above the loss before training."""

    def __init__(self, limit: float, end: Any = 9.0) -> None:
        super().__init__(by_rate)
        self.limit, self.end = limit, end

    def __call__(self, settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        spoilt = "stop_rise" in settings and settings["learning_rate"] > self.limit
        self.ends = lambda method, rate: self.end if spoilt else 4.8 - rate
        found = super().__call__(settings, run)
        if spoilt:
            found["stopped"] = "rise"
            (run / "summary.json").write_text(json.dumps(found))
        return found


@pytest.mark.parametrize("end", [9.0, DivergedError("the loss of step 3 is inf")])
def test_a_rate_that_spoils_its_run_gives_way_to_the_next(tmp_path: Path, end: Any) -> None:
    given = settings(tmp_path, methods="mezo", learning_rates="1e-5:3e-5:1e-4")
    runs, said = Spoils(2e-5, end), list[str]()
    report = compare(given, said.append, runs)
    word = "diverged" if isinstance(end, Exception) else "rose"
    assert [one["outcome"] for one in report["sweep"]["mezo"]["tried"]] == ["finished", word, word]
    assert report["methods"]["mezo"]["trial"]["values"]["learning_rate"] == 1e-5
    assert report["methods"]["mezo"]["last"]["loss"] == 4.8 - 1e-5
    why = "step 3 is inf" if isinstance(end, Exception) else "from 5.0000 to 9.0000 at step 4"
    assert "learning rate 0.0001, epsilon 0.001 did well in the sweep, but in its run" in (
        text := to_text(report)
    )
    assert why in text and any("taking the next best" in line for line in said)
    kept = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert kept == {
        "mezo",
        *(f"mezo-learning-rate-{rate}-epsilon-0.001.aside" for rate in ("3e-05", "0.0001")),
    }
    made = len(runs.made)
    assert compare(given, id, runs) == report
    assert len(runs.made) == made
    # killed before the first of them was set aside
    folder = tmp_path / "out" / "runs"
    shutil.rmtree(folder / "mezo")
    (folder / "mezo-learning-rate-0.0001-epsilon-0.001.aside").rename(folder / "mezo")
    assert compare(given, id, runs) == report


def test_the_last_rate_is_kept_whatever_it_does(tmp_path: Path) -> None:
    for number, rates in enumerate(("1e-5:3e-5", "3e-5")):
        given = settings(
            tmp_path, methods="mezo", learning_rates=rates, output=str(tmp_path / str(number))
        )
        report = compare(given, id, Spoils(0.0))
        assert report["methods"]["mezo"]["trial"]["values"]["learning_rate"] == float(rates[:4])
        assert report["methods"]["mezo"]["stopped"] == "rise"
        assert "rise" in to_text(report)
