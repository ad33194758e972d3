"""MeZO end to end: replay from the log, its refusals; and how runs may end."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest
from support.bundles import Tiny
from support.runs import (
    adapter,
    here,
    json_of,
    metrics_of,
    refuses,
    struck,
    succeeds,
    summary_of,
    train_arguments,
    unbound,
)
from support.shared import Shared

from runtime.config.train import TrainConfig
from runtime.core.errors import BudgetError
from runtime.machine.footprint import Meter
from runtime.machine.machine_code import lacking
from runtime.run import start
from runtime.run.results import Events
from runtime.run.trainer import Trainer

STEPS = 3


def mezo_arguments(bundle: Path, run: Path, steps: int, **more: object) -> list[str]:
    return train_arguments(bundle, run, steps, method="mezo", **more)


@pytest.fixture(scope="module")
def run(bundle: Path, shared: Shared) -> Path:
    def train(path: Path) -> None:
        succeeds(*mezo_arguments(bundle, path, STEPS, queries=2, grad_accumulation=2))

    return shared("a run of MeZO", train)


def test_a_run_is_rebuilt_from_its_log(run: Path, tmp_path: Path) -> None:
    facts = json_of("replay", run, "-o", tmp_path / "again")
    assert facts["identical"] is True and facts["steps"] == STEPS
    assert adapter(tmp_path / "again") == adapter(run)
    assert summary_of(run)["forward_passes"] == STEPS * 2 * 2 * 2
    lines = (run / "trajectory.jsonl").read_text().splitlines()[1:]
    assert max(map(len, lines)) < 80


def test_a_log_of_something_else_is_refused(run: Path, tiny: Tiny, tmp_path: Path) -> None:
    other = tiny("qwen2", seq_lens=(16, 32), group_size=32).path
    refuses(4, "other weights", "replay", run, "-o", tmp_path / "no", "--bundle", other)
    refuses(4, "other adapters", "replay", run, "-o", tmp_path / "no", "--initial", run)
    assert not (tmp_path / "no").exists()
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    log = copy / "trajectory.jsonl"
    whole = log.read_text()
    for altered in (whole.replace("[", "[NaN, ", 1), "", "{}\n", whole.replace("-1", "-9", 1)):
        log.write_text(altered)
        refuses(4, "trajectory", "replay", copy, "-o", tmp_path / "no")
    log.write_text(whole + "[0.01, [0.2")  # the line that a killed process was writing
    succeeds("replay", copy, "-o", tmp_path / "yes", by=here)
    assert adapter(tmp_path / "yes") == adapter(run)
    refuses(2, "the run itself", "replay", run, "-o", run)
    log.unlink()
    refuses(2, "its method logs no steps", "replay", copy, "-o", tmp_path / "no")


@pytest.mark.parametrize("flag", ["--save-every=2", "--budget=50MB"])
def test_no_setting_of_the_machine_changes_the_result(
    bundle: Path, run: Path, tmp_path: Path, flag: str
) -> None:
    more = {"queries": 2, "grad_accumulation": 2}
    succeeds(*mezo_arguments(bundle, tmp_path / "run", STEPS, **more), flag)
    if "budget" not in flag:  # another budget may choose other tiles
        assert adapter(tmp_path / "run") == adapter(run)
    losses = [[one["loss"] for one in metrics_of(path)] for path in (run, tmp_path / "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_ten_losses_that_are_not_finite_end_the_run(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = unbound(*mezo_arguments(bundle, run, 50, epsilon=1e30, save_every=0))
    assert done.returncode == 1 and "10 steps in a row" in done.stderr
    assert done.stderr.rstrip().endswith("; lower --epsilon")  # it never had a finite loss
    lines = metrics_of(run)
    assert len(lines) == 10 and all(line["skipped"] and line["loss"] is None for line in lines)
    assert (run / "saves" / "step-00000010" / "adapters.safetensors").exists()
    facts = json_of("replay", run, by=unbound)
    assert facts["skipped_steps"] == 10 and facts["identical"] is True


def test_a_signal_ends_an_evaluation_with_the_state_saved(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"eval_data": "random:3", "eval_rows": 9, "eval_every": 2, "save_every": 0}
    arguments = mezo_arguments(bundle, run, 4, **options)
    done = struck(signal.SIGTERM, "evaluating (before)", *arguments)
    assert done.returncode == 130, done.stderr
    assert "evaluating (before)" in done.stderr and "after step 0" in done.stderr
    assert (run / "saves" / "step-00000000").exists()


def test_an_evaluation_over_budget_saves_the_state(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "Meter", _Growing)
    config = TrainConfig(
        bundle=str(bundle), data="random:1", eval_data="random:2", output=str(tmp_path / "run"),
        max_seq_length=16, budget="1GB", steps=4, eval_every=2, eval_rows=3, save_every=0,
    )  # fmt: skip
    with pytest.raises(BudgetError, match="after step 2 is saved"):
        start.train(config, Events())
    assert (tmp_path / "run" / "saves" / "step-00000002").exists()


class _Growing(Meter):
    """Says that the budget is passed while the evaluation after step 2 runs."""

    @property
    def over_budget(self) -> bool:
        frame = sys._getframe()
        while frame is not None:
            training = frame.f_locals.get("self")
            if frame.f_code.co_name == "_evaluate" and isinstance(training, Trainer):
                return training.done == 2
            frame = frame.f_back  # type: ignore[assignment]
        return False


def test_training_goes_on_from_an_adapter(bundle: Path, run: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    arguments = mezo_arguments(bundle, more, 2, adapter=run, eval_data="random:3", eval_rows=1)
    succeeds(*arguments)
    assert json_of("replay", more)["identical"] is True
    own = ["eval", bundle, "--data", "random:3", "--eval-rows=1", "--max-seq-length=24"]
    measured = json_of(*own, "--adapter", run, "--budget=200MB")["loss"]
    before = summary_of(more)["eval"]["before"]
    assert before["loss"] == pytest.approx(measured, rel=1e-6)


def test_runs_end_where_they_are_told_to(bundle: Path, tmp_path: Path) -> None:
    common = {"eval_data": "random:3", "eval_rows": 1, "eval_every": 2}
    timed, reached = tmp_path / "timed", tmp_path / "reached"
    succeeds(*train_arguments(bundle, timed, 10_000, stop_seconds=0.5, **common))
    facts = summary_of(timed)
    assert facts["stopped"] == "seconds" and facts["seconds"] >= 0.5
    assert facts["steps"] < 10_000
    succeeds(*train_arguments(bundle, reached, 10_000, stop_loss=1000, **common))
    facts = summary_of(reached)
    assert facts["stopped"] == "loss" and facts["steps"] == 0
    steps = [int(path.name[5:]) for path in (reached / "saves").iterdir()]
    assert steps == [0] and (reached / "adapters.safetensors").exists()


def test_profile_tells_where_time_goes(bundle: Path, tmp_path: Path) -> None:
    for method in ("mebp", "mezo"):
        run = tmp_path / method
        succeeds(*train_arguments(bundle, run, 3, method=method), "--profile")
        facts = summary_of(run)
        owners = facts["seconds_per_step"]
        reads = {"read"} if lacking() else set()  # compiled code reads as it dequantizes
        assert {"unpack", "linear forward", "head"} | reads <= set(owners)
        assert 0 < sum(owners.values()) <= facts["seconds"] / 3 * 1.01
        blocks = facts["blocks"]
        assert [b["name"] for b in blocks][-1] == "head"
        assert all(b["forward_s"] > 0 and b["forward_peak_bytes"] > 0 for b in blocks)
        assert ("backward_s" in blocks[1]) == (method == "mebp")
        for way in ("forward", "backward"):
            told = [b[f"{way}_owners_s"] for b in blocks if f"{way}_s" in b]
            wholes = [b[f"{way}_s"] for b in blocks if f"{way}_s" in b]
            assert all(one and min(one.values()) >= 0 for one in told)  # weights may stay unpacked
            assert all(sum(a.values()) <= b * 1.01 for a, b in zip(told, wholes, strict=True))
        ways = [b.get(f"{way}_owners_s", {}) for b in blocks for way in ("forward", "backward")]
        unpacked = sum(one.get("unpack", 0.0) for one in ways)
        assert unpacked == pytest.approx(owners["unpack"])
