"""The best evaluation of a run: what is kept, when a run stops early, and both after kills."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
from support.bundles import Rng
from support.lengths import at_length
from support.runs import (
    adapter,
    check_same,
    here,
    json_of,
    ondevice,
    refuses,
    struck,
    succeeds,
    summary_of,
    train_arguments,
)
from support.shared import Shared

from runtime.core.errors import BundleError
from runtime.run.folder import RunFolder
from runtime.run.results import Best, Evaluation, best_of, no_better_since

STEPS = 15  # the best are the weights after step 6
WATCHED = {
    "eval_data": "random:5", "eval_rows": 2, "eval_every": 3, "save_every": 2, "keep": 2,
    "learning_rate": 0.1, "lr_schedule": "constant",
}  # fmt: skip


def found(losses: dict[str, float]) -> dict[str, Evaluation]:
    """Evaluations by when they were made."""
    rest = {"perplexity": None, "accuracy": 0.5, "exact": 0.0, "scored_tokens": 9, "rows": 3}
    known = {when: loss if math.isfinite(loss) else None for when, loss in losses.items()}
    return {when: Evaluation(loss=loss, **rest) for when, loss in known.items()}


def test_the_lowest_loss_is_the_best_and_the_first_of_equals() -> None:
    losses = {"before": 3.0, "4": 2.0, "10": math.nan, "8": 2.0, "after": 2.5, "99": 1.0}
    assert best_of(found(losses), 12) == Best(4, 2.0)
    assert best_of(found({**losses, "after": 1.5}), 12) == Best(12, 1.5)
    assert best_of(found({"before": 1.0, "4": 2.0}), 4) == Best(0, 1.0)
    assert best_of(found({"before": math.nan, "4": math.inf}), 4) is None
    assert best_of({}, 4) is None


def slow_since(losses: list[float], min_delta: float) -> int:
    """How many losses follow the last better one, found by trying every place for it."""
    better = [0]
    for place in range(1, len(losses)):
        if losses[place] < losses[better[-1]] - min_delta:
            better.append(place)
    return len(losses) - 1 - better[-1]


@at_length("draws", 50, 2000)
def test_evaluations_that_are_no_better_are_counted(rng: Rng, draws: int) -> None:
    for _ in range(draws):
        losses = [round(float(x), 1) for x in rng.uniform(1, 3, int(rng.integers(1, 9)))]
        min_delta = float(rng.choice([0.0, 0.25, 0.5]))
        steps = ["before", *(str(7 * i) for i in range(1, len(losses)))]
        named = found(dict(zip(steps, losses, strict=True)))
        done = 7 * (len(losses) - 1)
        assert no_better_since(named, done, min_delta) == slow_since(losses, min_delta)
        if done:  # what is evaluated after the last step is no further evaluation
            again = {**named, "after": named[str(done)]}
            assert no_better_since(again, done, min_delta) == slow_since(losses, min_delta)
    assert no_better_since(found({"before": 2.0, "3": math.nan, "6": math.nan}), 6, 0.0) == 2


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "saves").iterdir())


def test_the_best_save_is_kept_and_is_the_adapter_at_the_end(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = succeeds(*train_arguments(bundle, run, STEPS, **WATCHED), "--keep-best")
    facts = summary_of(run)
    losses = {
        {"before": 0, "after": STEPS}.get(when) or int(when.replace("before", "0")): one["loss"]
        for when, one in facts["eval"].items()
    }
    best = min(losses, key=lambda step: (losses[step], step))
    assert facts["best"] == {"step": best, "loss": losses[best]}
    assert f"the run's adapter is that after step {best}, whose held-out loss of " in done.stdout
    # each evaluation that was the best so far has been saved, too
    bests = {step for step in losses if all(losses[step] < losses[x] for x in losses if x < step)}
    saves = {*range(2, STEPS + 1, 2), *bests, STEPS}
    assert steps_saved(run) == sorted({best, *sorted(saves)[-2:]})
    assert adapter(run) == adapter(run / "saves" / f"step-{best:08d}")
    assert json_of("train", "--resume", run)["best"] == facts["best"]
    assert adapter(run) == adapter(run / "saves" / f"step-{best:08d}")
    words = ["--data=random:5", "--eval-rows=2", "--max-seq-length=24", f"--adapter={run}"]
    measured = json_of("eval", bundle, *words)["loss"]
    assert measured == pytest.approx(losses[best], rel=1e-6)


@pytest.fixture(scope="module")
def whole(bundle: Path, shared: Shared) -> Path:
    """A run that keeps its best save and that patience may end."""

    def train(path: Path) -> None:
        succeeds(*train_arguments(bundle, path, STEPS, **WATCHED, patience=2), "--keep-best")

    return shared("a run that keeps its best save", train)


@at_length("kills", 1, 12)
def test_killed_and_resumed_keeps_the_same_best(
    bundle: Path, whole: Path, rng: Rng, tmp_path: Path, kills: int
) -> None:
    killed = tmp_path / "killed"
    ended = summary_of(whole)["steps"]
    moments = [f"step {step}" for step in range(1, ended + 1)]
    moments += [f"evaluating ({step})" for step in range(3, ended, 3)]
    arguments = [*train_arguments(bundle, killed, STEPS, **WATCHED, patience=2), "--keep-best"]
    for moment in rng.choice(moments, kills):
        print(moment)
        struck(signal.SIGKILL, str(moment), *arguments)
        arguments = ["train", "--resume", str(killed)]
    succeeds("train", "--resume", killed)
    one, other = summary_of(whole), summary_of(killed)
    for key in ("steps", "stopped", "best", "eval", "evaluations_no_better"):
        assert one[key] == other[key], key
    check_same(killed, whole)
    assert steps_saved(killed) == steps_saved(whole)
    saves = [f"saves/step-{step:08d}" for step in steps_saved(whole)]
    assert all(adapter(killed / name) == adapter(whole / name) for name in saves)


def test_a_run_stops_when_patience_is_at_its_end(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # no loss is so much better
    options: dict[str, object] = {**WATCHED, "min_delta": 100, "patience": 2}
    done = succeeds(*train_arguments(bundle, run, STEPS, **options))
    facts = summary_of(run)
    assert facts["stopped"] == "patience" and facts["steps"] == 6
    assert "stopped early: 2 evaluations in a row had no better held-out loss" in done.stdout
    assert steps_saved(run) == [4, 6]
    resumed = succeeds("train", "--resume", run)
    assert "no better for as many evaluations" in resumed.stderr
    assert summary_of(run)["steps"] == 6
    config = (run / "config.toml").read_text()
    refused = ondevice("train", "--resume", run, "--steps", STEPS + 1)
    assert refused.returncode == 2, refused.stderr
    assert f"give --resume {run} --patience MORE (and --steps MORE)" in refused.stderr
    assert (run / "config.toml").read_text() == config and summary_of(run)["steps"] == 6
    further = succeeds("train", "--resume", run, "--patience", 4, "--steps", STEPS + 1)
    assert f"resuming after step 6 of {STEPS + 1}" in further.stderr
    assert summary_of(run)["stopped"] == "patience" and summary_of(run)["steps"] == 12
    succeeds("train", "--resume", run, "--patience", 99)
    assert summary_of(run)["stopped"] == "steps" and summary_of(run)["steps"] == STEPS + 1


def test_replay_rebuilds_the_best(bundle: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "replayed"
    options = {**WATCHED, "method": "mezo", "learning_rate": 1e-2}
    succeeds(*train_arguments(bundle, run, 10, **options), "--keep-best")
    facts = json_of("replay", run, "-o", output)
    assert facts["identical"] is True
    assert facts["best_step"] == summary_of(run)["best"]["step"] and facts["steps"] == 10
    assert adapter(output) == adapter(run)
    (run / "summary.json").unlink()  # a run that has not ended
    succeeds("replay", run, "-o", tmp_path / "last", "--json")
    assert adapter(tmp_path / "last") == adapter(run / "saves" / "step-00000010")


def test_what_watches_the_held_out_loss_needs_it(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    cases: list[tuple[dict[str, object], list[str], str]] = [
        ({}, ["--keep-best"], "keep_best needs eval_every"),
        ({"patience": 3}, ["--keep-best"], "keep_best and patience need eval_every"),
        ({"min_delta": 0.1, "eval_every": 2}, [], "min_delta needs patience"),
        ({"keep": 0}, [], "keep is 0"),
        ({"patience": 3, "eval_every": 4}, [], "--eval-every 4 > --steps 3: nothing is evaluated"),
        ({"patience": -1}, [], "patience is -1"),
    ]
    for options, flags, said in cases:
        refuses(2, said, *train_arguments(bundle, run, 3, **options), *flags)
        assert not run.exists()


def test_a_best_save_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is gone, which --keep-best has saved"):
        RunFolder(tmp_path).publish(3)


def test_a_kill_before_the_first_save_loses_no_best(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation before training is written, and the process dies before it is saved."""
    run = tmp_path / "run"
    options = {**WATCHED, "learning_rate": 1e-12, "save_every": 1, "keep": 1}  # moves no loss
    arguments = [*train_arguments(bundle, run, 3, **options), "--keep-best"]

    def dies(*anything: object) -> None:
        raise KeyError("as if it had been killed")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", dies)
        with pytest.raises(KeyError):
            here(*arguments)
    assert (run / "evaluations.json").exists() and not list((run / "saves").glob("step-*"))
    succeeds("train", "--resume", run, by=here)
    assert summary_of(run)["best"]["step"] == 0
    assert steps_saved(run) == [0, 3]
