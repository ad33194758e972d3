"""Training end to end, as a user runs it: resume after any death, refusals, budgets, files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.bundles import Tiny
from support.lengths import at_length
from support.runs import (
    COMMAND,
    adapter,
    evaluations_of,
    json_of,
    metrics_of,
    ondevice,
    refuses,
    replaced,
    struck,
    succeeds,
    summary_of,
    train_arguments,
    unbound,
)
from support.shared import Shared
from support.waiting import HANGS_S, wait_until

from runtime.core.units import format_bytes
from runtime.storage.saves import VERSION


def test_a_run_keeps_and_says_what_it_promises(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    held_out = {"eval_data": "random:9", "eval_rows": 2, "eval_every": 4, "batch_size": 2}
    done = succeeds(*train_arguments(bundle, run, 12, **held_out))
    where = f"the run and its adapter are in {run}; generate, eval and fuse take --adapter {run}\n"
    assert where in done.stdout
    summary, plan = summary_of(run), json.loads((run / "plan.json").read_text())
    expected = {
        "method", "steps", "budget_bytes", "predicted_peak_bytes", "peak_footprint_bytes",
        "peak_rss_bytes", "step_s_median", "tokens_per_s", "final_train_loss", "eval",
        "scored_tokens_per_s",
    }  # fmt: skip
    assert expected <= set(summary)
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"] == 400_000_000
    assert summary["tokens_per_s"] >= summary["scored_tokens_per_s"] > 0
    assert set(summary["eval"]) == {"before", "4", "8", "after"}
    for result in summary["eval"].values():
        assert {"loss", "perplexity", "accuracy"} <= set(result)
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [*range(1, 13)]
    keys = {
        "step", "loss", "learning_rate", "tokens", "scored_tokens", "seconds", "footprint_bytes",
    }  # fmt: skip
    assert all(keys <= set(line) for line in lines)
    assert all(line["tokens"] == 2 * 24 >= line["scored_tokens"] for line in lines)
    assert plan["bucket"] == 32
    said = done.stderr.splitlines()
    assert said[0].startswith("fits the budget of 400 MB: the expected peak is ")
    smallest = format_bytes(plan["minimum_bytes"], up=True)
    assert said[0].endswith(f"the smallest budget that fits is {smallest}")
    starts = (
        "before training: loss ", "step 1 of 12: loss ", "a step takes about ",
        "after step 4: loss ", "after step 8: loss ", "step 10 of 12: loss ",
        "step 12 of 12: loss ", "after training: loss ",
    )  # fmt: skip
    places = [next(i for i, line in enumerate(said) if line.startswith(one)) for one in starts]
    assert places == sorted(places)
    assert "sequence bucket of" not in done.stderr
    refuses(2, "--resume", *train_arguments(bundle, run, 3), by=ondevice)
    known = evaluations_of(run)
    known["after"]["loss"] = 123.0  # no evaluation would find it, and none is repeated
    replaced(run, "evaluations.json", json.dumps(known))
    before = adapter(run)
    again = succeeds("train", "--resume", run, "--verbose")
    assert "sequence bucket of 32 tokens, 2 sequences per batch" in again.stderr
    assert f"start another run with --adapter {run}" in again.stderr
    told = json_of("train", "--resume", run)
    assert told == summary_of(run) and told["eval"] == known and adapter(run) == before


def test_in_a_terminal_there_is_a_bar_below_what_is_said(bundle: Path, tmp_path: Path) -> None:
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (40, 80))
    held_out = {"eval_data": "random:9", "eval_rows": 2, "eval_every": 4}
    arguments = train_arguments(bundle, tmp_path / "run", 10, **held_out)
    process = subprocess.Popen([*COMMAND, *arguments], stdout=follower, stderr=follower)
    os.close(follower)
    parts = []
    with contextlib.suppress(OSError), os.fdopen(leader, "rb", buffering=0) as terminal:
        while part := terminal.read(1 << 16):  # fails where nobody writes any more
            parts.append(part)
    assert process.wait(timeout=HANGS_S) == 0
    drawn = b"".join(parts).decode().replace("\r\n", "\n").split("\n")
    lines = [line.rpartition("\x1b[2K\r")[2] for line in drawn]  # as they stand at the end
    starts = (
        "fits the budget of ", "before training: loss ", "a step takes about ",
        "after step 4: loss ", "after step 8: loss ", "after training: loss ",
    )  # fmt: skip
    for start in starts:
        assert any(line.startswith(start) for line in lines), (start, lines)
    progress = [line for line in re.split(r"\x1b\[2K\r|\n", "\n".join(drawn)) if " of 10, " in line]
    assert progress and all("footprint" in line and len(line) < 80 for line in progress)
    assert not any(line in lines for line in progress)
    assert any(line.startswith("mebp: 10 steps, ") for line in lines)


def test_a_run_ends_where_its_loss_has_risen(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("gemma3", seq_lens=(16, 32), device="auto").path  # of which such a rate is wild
    held_out = {"eval_data": "random:9", "eval_rows": 2, "eval_every": 2}
    wild = train_arguments(bundle, tmp_path / "run", 50, stop_rise=1.02, **held_out)
    done = succeeds(*wild, "--optimizer=sgd", "--learning-rate=3000", "--json")
    summary = json.loads(done.stdout)
    assert summary["stopped"] == "rise" and 0 < summary["steps"] < 50
    losses = {when: one["loss"] for when, one in summary["eval"].items()}
    assert losses["after"] > 1.02 * losses["before"]
    assert all(
        loss <= 1.02 * losses["before"]
        for when, loss in losses.items()
        if when != "after" and when != str(summary["steps"])
    )


@at_length("most", 1, 10)
@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_kills_and_the_same_bytes(
    tiny: Tiny, rng: np.random.Generator, family: str, most: int, tmp_path: Path
) -> None:
    """SIGKILL at random moments, many inside a save: the adapter is what it would have been."""
    bundle = tiny(family, "mixed", seq_lens=(16, 32), device="auto").path
    steps = 15 * most - 9  # of which each process does at least one, and often two or three
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = {"steps": steps, "grad_accumulation": 2}
    succeeds(*train_arguments(bundle, whole, **options))
    kills = inside = 0
    started = False
    while kills < most:
        arguments = ["train", "--resume", str(killed)]
        if not started:
            arguments = train_arguments(bundle, killed, **options)
        process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.DEVNULL)
        # let it make some progress, so that the kills fit the run
        wait_until(partial(_has_gone_on, process, killed, _latest(killed)))
        time.sleep(rng.uniform(0, 0.12))
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        inside += any((killed / "saves").glob(".*.partial"))
        started = (killed / "config.toml").exists()
    succeeds("train", "--resume", killed)
    assert adapter(killed) == adapter(whole)
    metrics, expected = metrics_of(killed), metrics_of(whole)
    assert [m["step"] for m in metrics] == list(range(1, steps + 1))
    assert [m["loss"] for m in metrics] == [m["loss"] for m in expected]
    print(f"{kills} kills, {inside} inside a save")


def _has_gone_on(process: subprocess.Popen[bytes], run: Path, before: str) -> bool:
    return _latest(run) != before or process.poll() is not None


def _latest(run: Path) -> str:
    return max((path.name for path in run.glob("saves/step-*")), default="")


@pytest.fixture
def whole(bundle: Path, shared: Shared) -> Path:
    """A run of 5 steps that nothing interrupted."""

    def train(path: Path) -> None:
        succeeds(*train_arguments(bundle, path, 5, save_every=0))

    return shared("a run of 5 steps", train)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)  # test_a_terminal_that_hangs_up_lets_the_run_save sends SIGHUP too
def test_signals_save_and_leave(
    bundle: Path, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    stopped = tmp_path / "stopped"
    done = struck(number, "step 3", *train_arguments(bundle, stopped, 5, save_every=0))
    assert done.returncode == 130, done.stderr
    assert number.name in done.stderr and "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert _latest(stopped) == "step-00000003"
    succeeds("train", "--resume", stopped)
    assert adapter(stopped) == adapter(whole)


@pytest.mark.parametrize(("method", "second"), [("mebp", signal.SIGTERM), ("mezo", signal.SIGHUP)])
def test_a_second_signal_ends_at_once(
    bundle: Path, tmp_path: Path, method: str, second: signal.Signals
) -> None:
    run = tmp_path / "run"
    arguments = train_arguments(bundle, run, 5, save_every=2, method=method)
    done = struck((signal.SIGTERM, second), "step 3", *arguments)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr and "Traceback" not in done.stderr
    assert _latest(run) == "step-00000002"  # no other step is saved


# makes the terminal that it was given its own, so that it is told when that hangs up
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "ondevice", *sys.argv[1:]])
"""


def test_a_terminal_that_hangs_up_lets_the_run_save(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *train_arguments(bundle, run, 100_000)],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    wait_until(lambda: _latest(run), process)
    os.close(leader)
    assert process.wait(timeout=HANGS_S) == 130
    step = int(_latest(run).removeprefix("step-"))
    assert len((run / "metrics.jsonl").read_text().splitlines()) == step
    resumed = ondevice("train", "--resume", run, "--steps", step + 100_000, "--budget", "1MB")
    assert resumed.returncode == 3, resumed.stderr  # it would go on, with a budget


def test_refusals_leave_nothing(bundle: Path, tmp_path: Path) -> None:
    empty, bad = tmp_path / "empty.txt", tmp_path / "bad.jsonl"
    empty.write_text("")
    bad.write_text('{"text": "fine"}\n{"txt": 1}\n')
    run = tmp_path / "run"
    cases = [
        (train_arguments(bundle, run, 3, data=empty), 4, "no tokenizer"),
        (train_arguments(bundle, run, 3, data=tmp_path / "none"), 4, "no data at"),
        (train_arguments(bundle, run, 3, max_seq_length=99), 2, "--seq-lens"),
        (train_arguments(bundle, run, 0), 2, "steps is 0"),
        (train_arguments(bundle, run, 3, method="zo"), 2, "mezo"),
        (train_arguments(bundle, run, 3, method="mezo", epsilon=0), 2, "epsilon is 0"),
        (train_arguments(bundle, run, 3, method="mezo", queries=0), 2, "queries is 0"),
        (train_arguments(bundle, run, 2, eval_every=1), 2, "--eval-data"),
        (train_arguments(bundle, run, 3, stop_loss=2), 2, "stop_loss needs eval_every"),
        (train_arguments(bundle, run, 3, stop_rise=0.5), 2, "0, or above 1"),
        (train_arguments(tmp_path / "nowhere", run, 3), 4, "no bundle"),
        (["bench"], 2, "mebp-table2: "),
        (["train", "--resume", str(run)], 2, "no run to resume"),
    ]
    config = tmp_path / "config.toml"
    config.write_text("steps = 3\nlearning_rte = 1e-4\nbudget = 'lots'\n")
    cases.append(
        (["train", str(bundle), "--data=random:1", f"--config={config}"], 2, "learning_rate")
    )
    for arguments, code, said in cases:
        refuses(code, said, *arguments)
        assert not run.exists(), arguments


def test_damaged_bundles_and_saves_of_earlier_versions_are_refused(
    bundle: Path, rng: np.random.Generator, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(bundle, copy)
    run = tmp_path / "run"
    weights = copy / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[int(rng.integers(len(data)))] ^= 0x10
    weights.write_bytes(data)
    refuses(4, "SHA-256", *train_arguments(copy, run, 2))
    weights.write_bytes(data[:-1])
    refuses(4, "truncated", *train_arguments(copy, run, 2))
    assert not run.exists()
    succeeds(*train_arguments(bundle, run, 2))
    (save,) = (run / "saves").iterdir()
    about = json.loads((save / "state.json").read_bytes())
    assert about["version"] == VERSION
    (save / "state.json").write_text(json.dumps({**about, "version": VERSION - 1}))
    told = f"wrote it, with format version {VERSION - 1}, and "
    refuses(4, told, "train", "--resume", run)


def test_divergence_keeps_the_last_save(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = train_arguments(bundle, run, 9, learning_rate=1e30, lr_schedule="constant")
    done = refuses(1, "learning-rate", *arguments, by=unbound)
    assert "Traceback" not in done.stderr
    assert len(list(run.glob("saves/step-*"))) <= 1
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line


def test_adapters_of_other_weights_are_refused(bundle: Path, tiny: Tiny, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tiny("qwen2", seq_lens=(16, 32), seed=5).path
    succeeds(*train_arguments(bundle, run, 2))
    arguments = ["--data", "random:1", "--max-seq-length", 24]
    succeeds("eval", bundle, "--adapter", run, *arguments)
    refuses(4, "other weights", "eval", other, "--adapter", run, *arguments)
    refuses(4, "typo", "eval", bundle, "--adapter", tmp_path / "typo", *arguments)
    (run / "adapters.safetensors").unlink()  # as if killed between the last save and its copy
    succeeds("train", "--resume", run)
    succeeds("eval", bundle, "--adapter", run, *arguments)


def test_a_folder_with_other_files_is_left_alone(bundle: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "plan.json").write_text("mine")
    (mine / "letters.txt").write_text("mine")
    refuses(2, "letters.txt", *train_arguments(bundle, mine, 2))
    assert {path.name for path in mine.iterdir()} == {"plan.json", "letters.txt"}


@pytest.mark.parametrize(
    "lora", [{}, {"lora_rank": 5, "lora_layers": 2, "lora_targets": "q_proj,up_proj"}], ids=str
)
def test_adapters_load_in_mlx_lm(bundle: Path, tmp_path: Path, lora: dict[str, object]) -> None:
    """mlx-lm's own loader takes the adapter, and its logits are the bundle's."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import load_adapters
    from oracles.whole_model import dense_model, relative_error

    from runtime.bundle.store import open_bundle
    from runtime.methods.adapters import Adapters
    from runtime.run.lora import to_apply

    run = tmp_path / "run"
    flags = ["--rslora"] if lora else []
    succeeds(*train_arguments(bundle, run, 1, **lora), *flags)
    opened = to_apply(run, open_bundle(bundle))
    tokens = mx.array([[5, 80, 200, 7]])
    ours = dense_model(opened, Adapters.load(opened.manifest, run))(tokens)
    theirs = load_adapters(dense_model(opened), str(run))(tokens)
    assert relative_error(theirs, ours) <= 1e-6
    assert relative_error(dense_model(opened)(tokens), ours) > 1e-3


def test_disk_full_while_training_keeps_the_last_save(bundle: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)])
    if mounted.returncode:
        pytest.skip("this machine does not let a test mount a file system")
    try:
        run = disk / "run"
        filler = disk / "filler"
        process = subprocess.Popen(
            [*COMMAND, *train_arguments(bundle, run, 100000)], stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: _latest(run), process)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:  # until the disk is full
                file.write(bytes(4096))
        _, said = process.communicate(timeout=HANGS_S)
        assert process.returncode == 5, said
        assert "disk is full" in said and "Traceback" not in said
        assert f"; go on with: ondevice train --resume {run}" in said
        # two where it was full after a save was whole and before the one before it was removed
        assert 1 <= len(list(run.glob("saves/step-*"))) <= 2
        filler.unlink()
        process = subprocess.Popen(
            [*COMMAND, "train", "--resume", str(run)], stderr=subprocess.PIPE, text=True
        )
        before = _latest(run)
        wait_until(lambda: _latest(run) != before, process)
        process.kill()
        process.wait()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
