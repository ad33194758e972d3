"""What the wheel leaves out: its commands say so, and all else does without."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from harness.measure.provenance import PARTS

ROOT = Path(__file__).parents[3]
WITHOUT = f"""
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name in {PARTS}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Absent)
from ondevice.cli.main import main
sys.exit(main())
"""


def without_parts(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command where nothing that the wheel leaves out is installed."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *words], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("harness.peers", ("bench", "peers")),
        ("harness.peers", ("bench", "generation")),
    ],
)
def test_commands_say_which_part_is_missing(
    part: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    done = without_parts(*words, folder=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{part} is in the repository of ondevice only; clone it" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_list_of_benchmarks_says_it_too(tmp_path: Path) -> None:
    done = without_parts("bench", folder=tmp_path)
    lines = {line.split(":")[0].strip(): line for line in done.stderr.splitlines()}
    assert done.returncode == 2 and "harness.peers is in the repository" in lines["peers"]
    assert "MeBP's Table 2" in lines["mebp-table2"]


def test_the_wheel_leaves_these_parts_out(tmp_path: Path) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
        "targets"
    ]
    left_out = wheel["wheel"]["exclude"]
    assert {part.replace(".", "/") for part in PARTS} < set(left_out)
    assert all((ROOT / path).exists() for path in left_out)


def test_a_built_wheel_has_all_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = {
        path.relative_to(ROOT).as_posix()
        for folder in ("ondevice", "export", "runtime", "harness")
        for path in (ROOT / folder).rglob("*.py")
    }
    left_out = {name for name in kept if name.startswith(("harness/peers/", "harness/tasks/"))}
    assert {name for name in names if name.endswith(".py")} == kept - left_out - {
        "harness/report/readme_picture.py"
    }
