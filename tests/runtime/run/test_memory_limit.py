"""Training under the kernel's own limit: a control group as small as the plan says it may be."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from oracles.whole_model import relative_error
from support.bundles import Tiny
from support.cgroups import memory_group
from support.lengths import first_of
from support.runs import ondevice, train_arguments

from runtime.core.errors import BudgetError
from runtime.core.paths import cache_folder
from runtime.machine.machine_code import lacking
from runtime.plan.limit import KERNEL_BYTES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")


def planned(bundle: Path, method: str) -> dict[str, int]:
    """The plan of the smallest budget."""
    words = ["plan", bundle, "--max-seq-length=24", "--method", method, "--json"]
    smallest = json.loads(ondevice(*words, "--budget", "1GB").stdout)["minimum_bytes"]
    found: dict[str, int] = json.loads(ondevice(*words, "--budget", smallest).stdout)
    return found


@first_of("method", "mebp", "mezo")
def test_the_smallest_budget_fits_a_group_of_8_mb_more(
    tiny: Tiny, tmp_path: Path, method: str
) -> None:
    """The kernel would kill what passes it: page tables and its own memory are counted too."""
    bundle = tiny("gemma3").path
    plan = planned(bundle, method)
    words = {"method": method, "budget": plan["budget_bytes"]}
    limit_bytes = plan["predicted_peak_bytes"] + KERNEL_BYTES
    fresh = {"env": dict(os.environ)}  # a fork has loaded more, and might take other tiles
    # first, since it compiles code, which takes more memory than such a group leaves
    done = ondevice(*train_arguments(bundle, tmp_path / "free", 2, **words), **fresh)
    assert done.returncode == 0, done.stderr
    with memory_group(f"{os.getpid()}-{method}", limit_bytes) as group:
        done = group.run("-m", "ondevice", *train_arguments(bundle, tmp_path / "run", 2, **words))
        assert not group.killed, done.stderr
        assert done.returncode == 0, done.stderr
    # at the very limit a process that is a little larger takes other tiles
    limited, free = (
        mx.load(str(tmp_path / run / "adapters.safetensors")) for run in ("run", "free")
    )
    assert limited.keys() == free.keys()
    assert all(relative_error(limited[name], free[name]) < 1e-4 for name in free)


@pytest.mark.skipif(bool(lacking()), reason="compiles code")
def test_code_that_a_group_has_no_room_to_compile_is_said(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the process that compiles, and not the one that says so."""
    bundle = tiny("gemma3").path
    left_out = shutil.ignore_patterns("code")
    shutil.copytree(cache_folder(), tmp_path / "ondevice", ignore=left_out)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with memory_group(f"{os.getpid()}-code", 40_001_536) as group:
        train = train_arguments(bundle, tmp_path / "run", 1, budget="32MB")
        done = group.run("-m", "ondevice", *train)
    assert done.returncode == BudgetError.exit_code, done.stderr
    assert "the code stays in the cache folder" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_limit_below_the_budget_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("gemma3").path
    with memory_group(f"{os.getpid()}-refused", 200_003_584) as group:
        train = train_arguments(bundle, tmp_path / "run", 1, budget="300MB")
        done = group.run("-m", "ondevice", *train)
        assert done.returncode == BudgetError.exit_code
        assert "budget 300 MB > 200 MB, the memory limit under which this process" in done.stderr
        assert "give --budget 192 MB or less, or raise the limit" in done.stderr
        assert not (tmp_path / "run").exists()
        plan = ["-m", "ondevice", "plan", bundle, "--max-seq-length", 24, "--budget"]
        tight = group.run(*plan, "195MB")
        assert tight.returncode == 0, tight.stderr
        assert "leaves 5 MB beside the budget of 195 MB" in tight.stderr
        assert "memory limit of this process (container)" in tight.stdout
        roomy = group.run(*plan, "190MB")
        assert roomy.returncode == 0 and "warning" not in roomy.stderr
