"""MeZO end to end: resume, prefetch, replay from the log, its refusals; and how runs may end."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from support.bundles import Tiny
from support.runs import adapter, here, ondevice, struck, train_arguments
from support.shared import Shared

from runtime.config.train import TrainConfig
from runtime.core.errors import BudgetError
from runtime.machine.footprint import Meter
from runtime.run import start
from runtime.run.results import Events
from runtime.run.trainer import Trainer


def mezo_arguments(bundle: Path, run: Path, steps: int, **more: object) -> list[str]:
    return train_arguments(bundle, run, steps, method="mezo", **more)


def summary(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def run(bundle: Path, shared: Shared) -> Path:
    def train(path: Path) -> None:
        done = ondevice(*mezo_arguments(bundle, path, 12, queries=2, grad_accumulation=2))
        assert done.returncode == 0, done.stderr

    return shared("a run of MeZO", train)


def test_a_run_is_rebuilt_from_its_log(bundle: Path, run: Path, tmp_path: Path) -> None:
    done = ondevice("replay", run, "-o", tmp_path / "again", "--json")
    facts = json.loads(done.stdout)
    assert facts["identical"] is True and facts["steps"] == 12
    assert adapter(tmp_path / "again") == adapter(run)
    assert summary(run)["forward_passes"] == 12 * 2 * 2 * 4
    lines = (run / "trajectory.jsonl").read_text().splitlines()[1:]
    assert max(map(len, lines)) < 80


def test_a_log_of_something_else_is_refused(run: Path, tiny: Tiny, tmp_path: Path) -> None:
    other = tiny("gemma3", seq_lens=(16, 32), group_size=32).path
    refused = here("replay", run, "-o", tmp_path / "no", "--bundle", other)
    assert refused.returncode == 4 and "other weights" in refused.stderr
    refused = here("replay", run, "-o", tmp_path / "no", "--initial", run)
    assert refused.returncode == 4 and "other adapters" in refused.stderr
    assert not (tmp_path / "no").exists()
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    log = copy / "trajectory.jsonl"
    whole = log.read_text()
    for altered in (whole.replace("[", "[NaN, ", 1), "", "{}\n", whole.replace("-1", "-9", 1)):
        log.write_text(altered)
        refused = here("replay", copy, "-o", tmp_path / "no")
        assert refused.returncode == 4 and "trajectory" in refused.stderr, altered
    log.write_text(whole + "[0.01, [0.2")  # the line that a killed process was writing
    assert here("replay", copy, "-o", tmp_path / "yes").returncode == 0
    assert adapter(tmp_path / "yes") == adapter(run)
    for lie in ({"noise": "laplace"}, {"seed": "1"}, {"weight_decay": float("nan")}, {"seed": -1},
                {"weights_sha256": 3}, {"initial_sha256": None}):  # fmt: skip
        header = {**json.loads(whole.splitlines()[0]), **lie}
        log.write_text("\n".join([json.dumps(header), *whole.splitlines()[1:]]) + "\n")
        refused = here("replay", copy, "-o", tmp_path / "no")
        assert refused.returncode == 4 and "Traceback" not in refused.stderr, lie
    for odd in ("[" * 200_000, "[0.1, [" + "9" * 400 + "]]"):
        log.write_text(whole + odd + "\n")
        refused = here("replay", copy, "-o", tmp_path / "no")
        assert refused.returncode == 4 and "Traceback" not in refused.stderr, odd[:9]
    refused = here("replay", run, "-o", run)
    assert refused.returncode == 2 and "the run itself" in refused.stderr
    log.unlink()
    refused = here("replay", copy, "-o", tmp_path / "no")
    assert refused.returncode == 2 and "its method logs no steps" in refused.stderr


@pytest.mark.parametrize("options", [{"prefetch": None}, {"save_every": 5}, {"budget": "50MB"}])
def test_no_setting_of_the_machine_changes_the_result(
    bundle: Path, run: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    more = {"queries": 2, "grad_accumulation": 2, **options}
    more.pop("prefetch", None)
    arguments = mezo_arguments(bundle, tmp_path / "run", 12, **more)
    if "prefetch" in options:
        arguments.append("--no-prefetch")
    assert ondevice(*arguments).returncode == 0
    if "budget" not in options:  # another budget may choose other tiles
        assert adapter(tmp_path / "run") == adapter(run)
    losses = [
        [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (run, tmp_path / "run")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_killed_and_resumed_is_the_same(bundle: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"save_every": 3, "eval_data": "random:3", "eval_rows": 1, "eval_every": 7}
    assert ondevice(*mezo_arguments(bundle, whole, 24, **options)).returncode == 0
    done = struck(signal.SIGKILL, "step 11", *mezo_arguments(bundle, killed, 24, **options))
    assert done.returncode == -signal.SIGKILL, done.stderr
    log = killed / "trajectory.jsonl"
    assert len(log.read_text().splitlines()) == 1 + 11  # two steps more than are saved
    assert ondevice("train", "--resume", killed).returncode == 0
    assert adapter(killed) == adapter(whole)
    assert log.read_text() == (whole / "trajectory.jsonl").read_text()
    assert summary(killed)["eval"] == summary(whole)["eval"]
    assert json.loads(ondevice("replay", killed, "--json").stdout)["identical"] is True


def test_ten_losses_that_are_not_finite_end_the_run(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = ondevice(*mezo_arguments(bundle, run, 50, epsilon=1e30, save_every=0))
    assert done.returncode == 1 and "10 steps in a row" in done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 10 and all(line["skipped"] and line["loss"] is None for line in lines)
    assert (run / "saves" / "step-00000010" / "adapters.safetensors").exists()
    done = ondevice("replay", run, "--json")
    assert json.loads(done.stdout) | {"skipped_steps": 10, "identical": True} == json.loads(
        done.stdout
    )


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


def test_evaluating_needs_data_to_evaluate_on(bundle: Path, tmp_path: Path) -> None:
    refused = here(*train_arguments(bundle, tmp_path / "run", 2, eval_every=1))
    assert refused.returncode == 2 and "--eval-data" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_training_goes_on_from_an_adapter(bundle: Path, run: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    arguments = mezo_arguments(bundle, more, 2, adapter=run, eval_data="random:3", eval_rows=1)
    assert ondevice(*arguments).returncode == 0
    assert json.loads(ondevice("replay", more, "--json").stdout)["identical"] is True
    own = ["eval", bundle, "--data", "random:3", "--eval-rows=1", "--max-seq-length=24"]
    found = json.loads(ondevice(*own, "--adapter", run, "--budget=200MB", "--json").stdout)
    before = summary(more)["eval"]["before"]  # type: ignore[index]
    assert before["loss"] == pytest.approx(found["loss"], rel=1e-6)


@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_runs_end_where_they_are_told_to(bundle: Path, tmp_path: Path, method: str) -> None:
    common = {"method": method, "eval_data": "random:3", "eval_rows": 1, "eval_every": 2}
    timed, reached = tmp_path / "timed", tmp_path / "reached"
    done = ondevice(*train_arguments(bundle, timed, 10_000, stop_seconds=0.5, **common))
    assert done.returncode == 0, done.stderr
    facts = summary(timed)
    assert facts["stopped"] == "seconds" and facts["seconds"] >= 0.5  # type: ignore[operator]
    assert facts["steps"] < 10_000  # type: ignore[operator]
    done = ondevice(*train_arguments(bundle, reached, 10_000, stop_loss=1000, **common))
    assert done.returncode == 0, done.stderr
    facts = summary(reached)
    assert facts["stopped"] == "loss" and facts["steps"] == 0
    steps = [int(path.name[5:]) for path in (reached / "saves").iterdir()]
    assert steps == [0] and (reached / "adapters.safetensors").exists()


def test_profile_tells_where_time_goes(bundle: Path, tmp_path: Path) -> None:
    for method in ("mebp", "mezo"):
        run = tmp_path / method
        done = ondevice(*train_arguments(bundle, run, 3, method=method), "--profile")
        assert done.returncode == 0, done.stderr
        facts = summary(run)
        owners = facts["seconds_per_step"]
        assert {"read", "unpack", "linear forward", "head"} <= set(owners)  # type: ignore[call-overload]
        assert 0 < sum(owners.values()) <= facts["seconds"] / 3 * 1.01  # type: ignore
        blocks = facts["blocks"]
        assert [b["name"] for b in blocks][-1] == "head"  # type: ignore[index,attr-defined]
        assert all(b["forward_s"] > 0 and b["forward_peak_bytes"] > 0 for b in blocks)  # type: ignore
        assert ("backward_s" in blocks[1]) == (method == "mebp")  # type: ignore[index]
        for way in ("forward", "backward"):
            told = [b[f"{way}_owners_s"] for b in blocks if f"{way}_s" in b]  # type: ignore
            wholes = [b[f"{way}_s"] for b in blocks if f"{way}_s" in b]  # type: ignore
            assert all(one and min(one.values()) >= 0 for one in told)  # weights may stay unpacked
            assert all(sum(a.values()) <= b * 1.01 for a, b in zip(told, wholes, strict=True))
        ways = [b.get(f"{way}_owners_s", {}) for b in blocks for way in ("forward", "backward")]  # type: ignore
        unpacked = sum(one.get("unpack", 0.0) for one in ways)
        assert unpacked == pytest.approx(owners["unpack"])  # type: ignore[index]
