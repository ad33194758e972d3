"""Peers: paired statistics, the table, peers that cannot run, and one benchmark for real."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.measure.other_load import STAT, busy_ticks, other_load
from harness.measure.paired import Sample, Spread, summarize
from harness.peers import peers as bench
from harness.peers.peers import PEERS, environment, finding, peers, run_process
from harness.peers.process import PREPARED, THREADS
from harness.peers.table import to_text
from harness.peers.torch_trainer import blas
from ondevice.errors import UsageError


def sample(*seconds: float, peaks: tuple[int, ...] | None = None, peak: int = 90) -> dict[str, Any]:
    return {
        "step_s": list(seconds),
        "step_peak_bytes": peaks and list(peaks),
        "peak_footprint_bytes": peak,
        "peak_rss_bytes": 100,
        "trainable_parameters": 7,
        "threads": 2,
        "blas": "some",
        "versions": {"torch": "2.13.0"},
        "other_cores": 0.05,
    }


def report(found: dict[str, Any], failures: dict[str, str] | None = None) -> dict[str, Any]:
    names = ("ours", "torch-float32", "mlx-lm")
    made = bench._Bench(Path("b"), "tiny-qwen2", 16, 3, "1GB", "python", 2, print)
    made.found, made.failures = found, failures or {}
    return made.report([name for name in names if name in {**found, **made.failures}], 2)


# --- statistics -------------------------------------------------------------------------------


def test_the_first_step_is_warm_up_unless_it_is_alone() -> None:
    assert Sample.of(sample(9.0, 1.0, 2.0)).timed == (1.0, 2.0)
    assert Sample.of(sample(9.0)).timed == (9.0,)


def test_the_training_peak_leaves_loading_out_where_steps_are_known() -> None:
    assert Sample.of(sample(1.0, 1.0, peaks=(40, 30))).training_peak_bytes == 40
    assert Sample.of(sample(1.0, 1.0)).training_peak_bytes == 90


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down by half changes both of a round, and no ratio."""
    ours = {n: Sample.of(sample(9.0, s)) for n, s in ((1, 1.0), (2, 2.0), (3, 3.0))}
    theirs = {n: Sample.of(sample(9.0, 2 * s)) for n, s in ((1, 1.0), (2, 2.0), (4, 50.0))}
    found = summarize(theirs, ours)
    assert found["time_ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5, "count": 2}
    assert found["step_s"] == {"median": 4.0, "low": 2.0, "high": 100.0, "count": 3}
    assert found["peak_ratio"]["median"] == 1.0


def test_the_median_ratio_is_not_the_ratio_of_medians() -> None:
    ours = {n: Sample.of(sample(0.0, s)) for n, s in ((1, 1.0), (2, 4.0), (3, 3.0))}
    theirs = {n: Sample.of(sample(0.0, s)) for n, s in ((1, 10.0), (2, 5.0), (3, 2.0))}
    found = summarize(theirs, ours)["time_ratio"]
    assert found == {"median": 0.8, "low": 0.1, "high": 1.5, "count": 3}


def test_without_ours_there_is_no_ratio() -> None:
    assert summarize({1: Sample.of(sample(1.0))}, {})["time_ratio"] is None
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 1)


# --- report and table -------------------------------------------------------------------------


def test_the_table_has_every_peer_and_says_what_must_be_said() -> None:
    ours = {1: sample(9.0, 1.0), 2: sample(9.0, 1.5)}
    theirs = {1: sample(9.0, 2.0, peaks=(20, 30)), 2: sample(9.0, 2.0, peaks=(30, 20))}
    found = {"ours": ours, "torch-float32": theirs}
    made = report(found, {"mlx-lm": "mlx_lm cannot be imported"})
    assert json.loads(json.dumps(made)) == made
    assert made["peers"]["mlx-lm"]["outcome"] == "could not run"
    text = to_text(made)
    assert "| 0.625 (0.500 to 0.750) | 3.000 " in text
    assert "mlx-lm could not run: mlx_lm cannot be imported" in text
    assert "NOT THE SAME LORA" not in text and "single step" not in text
    lengths = {len(line) for line in text.splitlines() if line.startswith("|")}
    assert len(lengths) == 1


def test_a_peer_that_fails_later_keeps_its_rounds() -> None:
    made = report({"ours": {1: sample(9.0, 1.0)}}, {"ours": "it broke"})
    assert made["peers"]["ours"]["outcome"] == "failed later"
    assert made["peers"]["ours"]["step_s"]["median"] == 1.0
    assert "ours failed later: it broke" in to_text(made)


def test_other_adapters_and_single_steps_are_said() -> None:
    odd = {**sample(5.0, peaks=(1,)), "trainable_parameters": 8}
    text = to_text(report({"ours": {1: sample(9.0, 1.0)}, "mlx-lm": {1: odd}}))
    assert "mlx-lm ran a single step" in text
    assert "NOT THE SAME LORA, numbers of trainable parameters differ: ours 7, mlx-lm 8" in text


def test_settings_from_outside_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PREPARED:
        monkeypatch.delenv(name, raising=False)
    assert "NOT OUR CHOICE" not in to_text(report({"ours": {1: sample(9.0, 1.0)}}))
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    assert "NOT OUR CHOICE: OPENBLAS_CORETYPE=Zen" in to_text(report({"ours": {1: sample(9.0)}}))
    kept = [name for name, peer in PEERS.items() if not peer.as_it_comes]
    assert kept == ["ours", "mlx-lm-blas", "paper", "mlx-lm-4bit"]


def test_a_busy_neighbour_is_said() -> None:
    busy = {**sample(9.0, 1.0), "other_cores": 0.5}
    text = to_text(report({"ours": {1: sample(9.0, 1.0), 2: busy}}))
    assert text.count("NOT ALONE") == 1 and "0.50 cores busy while ours ran in round 2" in text


def test_our_own_processes_are_no_neighbours() -> None:
    script = "import time; end = time.time() + 0.6\nwhile time.time() < end: pass"
    with other_load() as alone:
        subprocess.run([sys.executable, "-c", script], check=True)
    neighbour = subprocess.Popen([sys.executable, "-c", script])  # not ended, so not yet ours
    with other_load() as beside:
        time.sleep(0.4)
    neighbour.wait()
    if not STAT.exists():
        assert alone.cores is None
    else:
        assert alone.cores is not None and beside.cores is not None and beside.cores > 0.3
    assert busy_ticks("cpu  1 2 4 8 16 32 64 128 256 512\ncpu0 1") == 1 + 2 + 4 + 32 + 64 + 128


def test_nothing_is_found_of_a_peer_without_rounds() -> None:
    assert finding("paper", {}, {"paper": "why"})["reason"] == "why"


def test_blas_of_pytorch() -> None:
    settings = "  - Intel(R) MKL-DNN v3.12.0 (Git)\n  - CPU capability usage: AVX2\n BLAS_INFO=mkl,"
    assert blas(settings) == "mkl, oneDNN 3.12.0, AVX2"
    assert blas("") == "unknown"


# --- processes --------------------------------------------------------------------------------


def test_why_a_process_left_nothing(tmp_path: Path) -> None:
    def reason(script: str) -> str:
        found = run_process([sys.executable, "-c", script], tmp_path / "result.json")
        return str(found["failed"])

    assert "SIGKILL; out of memory" in reason("import os; os.kill(os.getpid(), 9)")
    assert reason("raise SystemExit('no luck')").endswith("ended with code 1: no luck")
    missing = str(tmp_path / "python")
    assert "cannot be started" in run_process([missing], tmp_path / "result.json")["failed"]


def test_the_environment_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREPARED[0], "Zen")
    monkeypatch.delenv(THREADS[0], raising=False)
    before = dict(os.environ)
    with environment(3, as_it_comes=True):
        assert all(os.environ[name] == "3" for name in THREADS)
        assert not set(PREPARED) & set(os.environ)
    assert dict(os.environ) == before
    with environment(1, as_it_comes=False):
        assert os.environ[PREPARED[0]] == "Zen"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"preset": "gpt"}, "no preset 'gpt'; there are"),
        ({"names": ("ours", "jax")}, "peers jax: choose some of"),
        ({"names": ("ours", "ours")}, "each once"),
        ({"names": ()}, "peers none"),
        ({"steps": 0}, "steps 0 is less than 1"),
        ({"python": "/no/python"}, "is no interpreter"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        peers(output=tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "raise ModuleNotFoundError('none', name='torch')"
    (tmp_path / "torch.py").write_text(missing)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("torch-float32",)
    made = peers(output=tmp_path / "out", preset="tiny-qwen2", names=names, repeats=2)
    found = made["peers"]["torch-float32"]
    assert found["outcome"] == "could not run"
    assert found["reason"] == f"torch cannot be imported by {sys.executable}"
    assert "--dtype float32" in found["command"]
    assert json.loads((tmp_path / "out" / "peers.json").read_text()) == made


def test_ours_the_papers_plan_and_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")  # the first kernels take a C++ compiler 17 s
    names = ("ours", "mlx-lm-blas", "paper")
    made = peers(
        output=tmp_path, preset="tiny-qwen2", tokens=32, steps=2, repeats=1, names=names, threads=1
    )
    found = made["peers"]
    assert [found[name]["reason"] for name in names] == ["", "", ""]
    for name in names:
        one = found[name]["rounds"]["1"]
        assert len(one["step_s"]) == 2 and found[name]["step_s"]["count"] == 1
        assert 10e6 < found[name]["training_peak_bytes"]["median"] <= one["peak_rss_bytes"]
        assert one["losses"][0] == pytest.approx(math.log(320), rel=0.5)
        assert one["trainable_parameters"] == found["ours"]["rounds"]["1"]["trainable_parameters"]
        assert one["environment"]["OPENBLAS_NUM_THREADS"] == "1"
    assert found["paper"]["time_ratio"]["median"] > 0
    assert found["ours"]["time_ratio"] is None
    assert f"{PEERS['paper'].what}, threads 1" in to_text(made)
    other = {"output": tmp_path, "bundle": tmp_path / "tiny-qwen2-32", "names": ("ours",)}
    with pytest.raises(UsageError, match="has graphs for 32 tokens, not 64"):
        peers(**other, preset="tiny-qwen2", tokens=64)
    with pytest.raises(UsageError, match="is of tiny-qwen2 with LoRA"):
        peers(**other, preset="tiny-qwen3", tokens=32)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "peft"))),
    reason="PyTorch and PEFT are in the bench extra, not in the development environment",
)
def test_pytorch(tmp_path: Path) -> None:
    names = ("torch-float32", "torch-bfloat16")
    options = {"preset": "tiny-qwen2", "tokens": 32, "steps": 2, "repeats": 1}
    made = peers(output=tmp_path, names=names, **options)
    for name in names:
        one = made["peers"][name]["rounds"]["1"]
        assert one["losses"][0] == pytest.approx(math.log(320), rel=0.1)
        assert one["trainable_parameters"] == 29_696
