"""`ondevice doctor`: its lines, its ways out, its exit code, and its table row."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from support.runs import here, json_of

from harness.bench.bench import find
from harness.bench.doctor import MODELS, describe_duration, markdown
from harness.config.bench import BenchConfig
from harness.doctor import doctor, machine
from harness.doctor.doctor import EXTRAS, PRODUCTS, computing, products_flops, verdict
from harness.doctor.finding import Finding, Status
from runtime.core.errors import BudgetError, OnDeviceError

ROOT = Path(__file__).parents[3]
PARTS = (
    "platform",
    "MLX",
    "BLAS",
    "products",
    "heap",
    "cores",
    "memory",
    "disk here",
    "cache folder",
)


def test_it_looks_at_everything_and_measures() -> None:
    report = json_of("doctor", by=here)
    found = {one["name"]: one for one in report["findings"]}
    assert {*PARTS, "packages", *(f"extra {name}" for name in EXTRAS)} <= {*found}
    assert found["MLX"]["facts"]["version"] == metadata.version("mlx")
    assert found["BLAS"]["facts"]["speeds"][PRODUCTS] > 0
    assert "GFLOP/s" in found["BLAS"]["text"]
    for one in report["findings"]:
        assert one["status"] in ("ok", "warning", "missing")
        assert one["way"] or one["status"] == "ok"
    assert report["verdict"].startswith("all that is essential works")


def test_what_is_broken_ends_with_1_and_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*words: str, module: str) -> str:
        raise OnDeviceError("the process of `probe` was ended by SIGILL")

    monkeypatch.setattr(doctor, "ondevice", fail)
    done = here("doctor")
    assert done.returncode == 1
    assert (
        "broken   MLX: it cannot compute: the process of `probe` was ended by SIGILL; install"
        in (done.stdout)
    )
    assert "\nbroken: 1" in done.stdout
    assert "cache folder" in done.stdout
    assert done.stderr == "ondevice: broken: MLX; the lines above say what to do\n"


def probed(rate: float, **more: object) -> str:
    facts = {"mlx": "1", "device": "cpu", "blas": "OpenBLAS (x)", "warning": "", "threads": 2}
    facts |= {"gpu": "", "nvidia": False, "tf32": "0"}
    facts |= {"products": {"name": "float32", "reason": "why"}}
    return json.dumps({**facts, "speeds": {PRODUCTS: rate}, **more})


def test_a_slow_blas_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [probed(90.0), probed(4.0), probed(4.0, blas="reference", warning="install libgfortran5")]
    )
    monkeypatch.setattr(doctor, "ondevice", lambda *words, module: next(answers))
    fast, slow, none = (computing()[1] for _ in range(3))
    assert [one.status for one in (fast, slow, none)] == ["ok", "warning", "warning"]
    assert "4 GFLOP/s" in slow.text and "other programs" in slow.way
    assert none.way == "install libgfortran5"


def test_a_compiler_that_the_system_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> str:
        raise BudgetError("the system has ended it; raise the limit")

    monkeypatch.setattr(doctor, "ondevice", lambda *words, module: probed(90.0))
    monkeypatch.setattr(doctor, "lacking", killed)
    monkeypatch.setattr(doctor, "is_built_for", lambda: True)
    compiled = computing()[-1]
    assert compiled.status is Status.MISSING and compiled.text.endswith("it; raise the limit")


def test_little_memory_disk_and_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 256_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (10**12, 0, 5_000_000))
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (64.0, 0.0, 0.0))
    monkeypatch.setattr(machine, "is_mine", lambda path: False)
    (tmp_path / "ondevice").mkdir()
    found = {one.name: one for one in machine.computer()}
    for name in ("cores", "memory", "disk here", "disk for temporary files", "cache folder"):
        assert found[name].status is Status.WARNING, name
        assert found[name].way
    assert "container limit 256 MB" in found["memory"].text
    assert "give a --budget below 256 MB" in found["memory"].way
    assert "5 MB free" in found["disk here"].text
    assert "belongs to another user" in found["cache folder"].text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (0, 0, 0))
    unknown = {one.name: one for one in machine.computer()}["disk for temporary files"]
    assert unknown.status is Status.OK and "free space not stated in" in unknown.text


def test_the_cache_folder_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ondevice" / "graphs" / "one").mkdir(parents=True)
    (tmp_path / "ondevice" / "graphs" / "one" / "file").write_bytes(bytes(1000))
    found = {one.name: one for one in machine.computer()}["cache folder"]
    assert found.status is Status.OK
    assert (found.facts["models"], found.facts["bytes"]) == (1, 1000)


def test_every_extra_and_package_of_the_project_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*project["optional-dependencies"]} == {*EXTRAS}
    assert project["name"] == doctor.DISTRIBUTION
    wanted = [
        *project["dependencies"],
        "no-such-package>=1",
        "numpy<1",
        'other>=1; sys_platform == "sunos5"',
        "no-such-tool>=2; extra == 'wandb'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    required, *extras = doctor.packages()
    extra = {one.name: one for one in extras}["extra wandb"]
    assert required.status is Status.BROKEN
    version = metadata.version("numpy")
    assert required.text == (
        f"no-such-package is not installed, numpy {version} is installed, <1 is needed"
    )
    assert extra.status is Status.MISSING
    assert extra.way == "if you want it: pip install 'ondevice-tune[wandb]'"
    with monkeypatch.context() as patch:

        def nothing(name: str) -> list[str]:
            raise metadata.PackageNotFoundError(name)

        patch.setattr(metadata, "requires", nothing)
        (alone,) = doctor.packages()
        assert alone.status is Status.WARNING and alone.way


def test_the_verdict_counts() -> None:
    ok, warned, missing = (
        Finding(status.value, status, "text")
        for status in (Status.OK, Status.WARNING, Status.MISSING)
    )
    assert verdict([ok]) == "all that is essential works"
    assert verdict([ok, warned, missing, missing]) == (
        "all that is essential works, warnings: 1, optional parts missing: 2"
    )
    assert verdict([Finding("x", Status.BROKEN, "t"), ok]) == "broken: 1"


@pytest.mark.slow
def test_a_row_is_measured_with_tiny_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "ondevice", lambda *words, module: probed(100.0))
    tiny = replace(find("doctor"), models=("tiny-qwen2",), lengths=(16,))
    monkeypatch.setattr("harness.bench.doctor.DOCTOR", tiny)
    done = here("doctor", "--bench", "--json")
    assert done.returncode == 0, done.stderr
    assert "measuring tiny-qwen2 with random weights: about " in done.stderr
    report = json.loads(done.stdout)
    head, _, row = (line.strip("| ").split(" | ") for line in report["row"].splitlines())
    cells = dict(zip(head, row, strict=True))
    assert set(cells) >= {"machine", "system", "MLX", "ondevice"}
    (measured,) = report["bench"]["rows"]
    for method in ("mebp", "mezo"):
        peak, step_s = map(float, cells[f"tiny-qwen2, {method}: MB / s"].split(" / "))
        small, large = (one for one in measured["variants"] if one["method"] == method)
        assert peak == pytest.approx(small["peak_footprint_bytes"] / 1e6, abs=0.06)
        assert step_s == pytest.approx(large["step_s"]["median"], rel=0.01)
    assert json.loads((tmp_path / "doctor.json").read_text()) == report["bench"]


def test_a_row_that_failed_says_so() -> None:
    report = {
        "machine": {"cpu": "A|B", "cores": 2, "memory_bytes": 1, "platform": "x", "mlx": "1"},
        "commit": "0123456789abcdef-dirty",
        "version": "1",
        "rows": [{"model": "m", "tokens": 1, "failed": "no bundle"}],
    }
    assert (
        markdown(report).splitlines()[-1] == "| A\\|B | 2 | 1 byte | x | 1 | 1 0123456789ab dirty |"
    )
    tables = find("doctor").tables(report["rows"])
    assert "no bundle" in tables[0].text()


def test_the_time_is_estimated_from_the_rate() -> None:
    config = BenchConfig(name="doctor", steps=2)
    slow, fast = (
        describe_duration(
            config,
            products_flops([Finding("BLAS", Status.OK, "", "", {"speeds": {PRODUCTS: rate}})]),
        )
        for rate in (4.0, 400.0)
    )
    assert slow != fast
    assert slow.startswith(f"measuring {', '.join(MODELS)} with random weights: about ")
    assert " h " in slow or " min " in slow


def test_a_gpu_that_rounds_to_tf32_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"device": "gpu", "gpu": "Apple M5"}
    answers = iter([probed(900.0, tf32="0", **gpu), probed(900.0, tf32="1", **gpu)])
    monkeypatch.setattr(doctor, "ondevice", lambda *words, module: next(answers))
    exact, rounding = (computing()[0] for _ in range(2))
    assert (exact.status, rounding.status) == (Status.OK, Status.WARNING)
    assert "Apple M5" in exact.text and "without TF32" in exact.text
    assert "unset MLX_ENABLE_TF32" in rounding.way


def test_first_runs_pass_budgets_on_nvidia_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = probed(900.0, device="gpu", gpu="NVIDIA H200", nvidia=True)
    monkeypatch.setattr(doctor, "ondevice", lambda *words, module: gpu)
    found = computing()[0]
    assert found.status is Status.WARNING and "NVIDIA H200" in found.text
    assert "compiling a kernel" in found.way and "from the second run on" in found.way


@pytest.mark.parametrize(("version", "status"), [("13.6", Status.BROKEN), ("14.1", Status.OK)])
def test_macos_before_14_is_refused_and_the_chip_named(
    monkeypatch: pytest.MonkeyPatch, version: str, status: Status
) -> None:
    monkeypatch.setattr(machine, "processor_name", lambda: "Apple M2")
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(machine.platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    found = {one.name: one for one in machine.computer()}
    assert found["platform"].status is status
    assert found["platform"].text.startswith(f"Apple M2, macOS {version}; ")
    assert "caffeinate -i ondevice train" in found["sleep"].text


@pytest.mark.skipif(machine.sys.platform != "linux", reason="macOS has another C library")
def test_an_old_glibc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", "2.31"))
    found = {one.name: one for one in machine.computer()}["heap"]
    assert found.status is Status.BROKEN and "glibc 2.35" in found.way
