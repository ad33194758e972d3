"""Peers: the notes and the table, programs that cannot run, and some of them for real."""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.bench.peers import PEERS, _figures, _without_paths, notes
from harness.measure.bundles import bundle_of
from harness.measure.other_load import STAT, busy_ticks, other_load
from harness.measure.repeats import Outcome
from harness.peers.launch import PROGRAMS, Setup, environment, inherited, run_peer
from harness.peers.torch_trainer import blas
from harness.peers.trainer import PREPARED, THREADS
from runtime.core.errors import OnDeviceError


def process(*seconds: float, peak: int = 90, **more: Any) -> dict[str, Any]:
    return {
        "step_s": list(seconds),
        "warm_up_steps": 1,
        "training_peak_bytes": peak,
        "peak_footprint_bytes": peak + 5,
        "peak_rss_bytes": 100,
        "trainable_parameters": 7,
        "threads": 2,
        "blas": "some",
        "other_cores": 0.05,
        **more,
    }


def found_of(**outcomes: Outcome) -> list[dict[str, Any]]:
    named = {name.replace("_", "-"): one for name, one in outcomes.items()}
    return [_figures(name, named) for name in named]


# --- figures and notes ------------------------------------------------------------------------


def test_ratios_are_within_a_turn() -> None:
    """A machine that slows down by half changes both of a turn, and no ratio."""
    ours = Outcome([process(1.0), process(2.0), process(3.0)])
    theirs = Outcome([process(2.0), process(4.0)], failed="it broke")
    one, other = found_of(ours=ours, torch_float32=theirs)
    assert other["time_ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert other["peak_ratio"]["median"] == 1.0 and one["time_ratio"] is None
    assert other["failed"] == "it broke" and other["step_s"]["median"] == 3.0
    (alone,) = found_of(torch_float32=theirs)
    assert alone["time_ratio"] is None


def test_the_table_has_every_program() -> None:
    ours = Outcome([process(1.0), process(1.5)])
    theirs = Outcome([process(2.0, peak=30), process(2.0, peak=30)])
    found = found_of(ours=ours, torch_float32=theirs, mlx_lm=Outcome(failed="none"))
    row = {"model": "tiny-qwen2", "tokens": 16, "failed": None, "variants": found}
    (table,) = PEERS.tables([row])
    assert table.rows[2][-4:] == ("0.625", "0.500-0.750", "3.000", "3.000-3.000")
    assert table.rows[3][2:4] == ("mlx-lm", "did not run")
    assert len({len(line) for line in table.rows}) == 1


def test_other_adapters_single_steps_and_busy_neighbours_are_reported() -> None:
    busy = process(1.0, other_cores=0.5)
    odd = process(5.0, trainable_parameters=8, warm_up_steps=0)
    said = notes(found_of(ours=Outcome([process(1.0), busy]), mlx_lm=Outcome([odd])), {})
    assert "mlx-lm ran a single step, whose time includes the warm-up" in said
    assert "NOT THE SAME LORA, numbers of trainable parameters differ: ours 7, mlx-lm 8" in said
    (alone,) = [text for text in said if "NOT ALONE" in text]
    assert "0.50 cores busy while ours ran in turn 2" in alone
    assert len(notes(found_of(ours=Outcome([process(1.0)])), {})) == 1


def test_settings_of_the_user_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PREPARED:
        monkeypatch.delenv(name, raising=False)
    assert inherited() == {}
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Zen")
    assert "NOT OUR CHOICE: OPENBLAS_CORETYPE=Zen" in notes([], inherited())[0]
    kept = [name for name, program in PROGRAMS.items() if not program.as_it_comes]
    assert kept == ["ours", "mlx-lm-blas", "mlx-lm-4bit"]


def test_reasons_name_no_interpreter() -> None:
    text = f"torch cannot be imported by /venv/python, {sys.executable}"
    said = _without_paths(text, "/venv/python")
    assert said == "torch cannot be imported by --python, python"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/stat")
def test_our_own_processes_are_no_neighbours() -> None:
    busy_s = 0.5
    works = (
        f"import time\nend_s = time.process_time() + {busy_s}\n"
        "while time.process_time() < end_s: pass\nprint(flush=True)"
    )
    with other_load() as alone:
        subprocess.run([sys.executable, "-c", works], check=True, stdout=subprocess.DEVNULL)
    with subprocess.Popen(
        [sys.executable, "-c", f"input()\n{works}\ninput()"],  # not ended, so not yet ours
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as neighbour:
        assert neighbour.stdin is not None and neighbour.stdout is not None
        before = time.monotonic()
        with other_load() as beside:  # from before its work to its end, however long it takes
            neighbour.stdin.write(b"\n")
            neighbour.stdin.flush()
            neighbour.stdout.readline()
        seconds = time.monotonic() - before
    if not STAT.exists():
        assert alone.cores is None
    else:
        assert alone.cores is not None and beside.cores is not None
        assert beside.cores * seconds > 0.7 * busy_s  # other programs can only add to it
    assert busy_ticks("cpu  1 2 4 8 16 32 64 128 256 512\ncpu0 1") == 1 + 2 + 4 + 32 + 64 + 128


def test_blas_of_pytorch() -> None:
    settings = "  - Intel(R) MKL-DNN v3.12.0 (Git)\n  - CPU capability usage: AVX2\n BLAS_INFO=mkl,"
    assert blas(settings) == "mkl, oneDNN 3.12.0, AVX2"
    assert blas("") == "unknown"


# --- processes --------------------------------------------------------------------------------


def test_why_a_process_left_nothing(tmp_path: Path) -> None:
    def reason(*command: str) -> str:
        with pytest.raises(OnDeviceError) as raised:
            run_peer(command, tmp_path / "result.json")
        return str(raised.value)

    def script(text: str) -> str:
        return reason(sys.executable, "-c", text)

    assert "ended by SIGKILL; free memory" in script("import os; os.kill(os.getpid(), 9)")
    assert script("raise SystemExit('no luck')").endswith("ended with code 1: no luck")
    assert "cannot be started" in reason(str(tmp_path / "python"))


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


def setup(bundle: Path, scratch: Path) -> Setup:
    return Setup(bundle, "tiny-qwen2", 32, 2, "1GB", sys.executable, 1, scratch)


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "raise ModuleNotFoundError('none', name='torch')"
    (tmp_path / "torch.py").write_text(missing)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(OnDeviceError, match="torch cannot be imported by"):
        setup(tmp_path, tmp_path).measure("torch-float32")


def test_ours_and_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")  # the first kernels take a C++ compiler 17 s
    bundle = bundle_of(tmp_path, "tiny-qwen2", (32,), lambda text: None)
    trained = set()
    for name in ("ours", "mlx-lm-blas"):
        one = setup(bundle, tmp_path).measure(name)
        assert len(one["step_s"]) == 1 and one["warm_up_steps"] == 1 and one["threads"] == 1
        assert 10e6 < one["training_peak_bytes"] <= one["peak_rss_bytes"]
        assert one["losses"][0] == pytest.approx(math.log(320), rel=0.5)
        assert one["environment"]["OPENBLAS_NUM_THREADS"] == "1"
        trained.add(one["trainable_parameters"])
    assert len(trained) == 1


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "peft"))),
    reason="PyTorch and PEFT are in the bench extra, not in the development environment",
)
def test_pytorch(tmp_path: Path) -> None:
    for name in ("torch-float32", "torch-bfloat16"):
        one = setup(tmp_path, tmp_path).measure(name)
        assert one["losses"][0] == pytest.approx(math.log(320), rel=0.1)
        assert one["trainable_parameters"] == 29_696


def test_torch_s_process_needs_nothing_of_ours_but_numpy() -> None:
    """An interpreter that has torch and peft is enough, as the help says."""
    code = (
        "import sys; import harness.peers.torch_trainer; "
        "print({m.split('.')[0] for m in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = ast.literal_eval(done.stdout)
    others -= {"sitecustomize"}
    assert {name for name in others if not name.startswith("_")} == {
        "export", "harness", "runtime", "numpy",
    }  # fmt: skip
