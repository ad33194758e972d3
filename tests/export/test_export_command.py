"""`ondevice export` as a user meets it: refusals and interruptions leave nothing behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import write_folder
from support.runs import here, struck


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    return here("export", *arguments)


TENSOR = "model.layers.1.mlp.up_proj"  # when it is written, others have been and more will be


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "graphs"), (signal.SIGTERM, TENSOR), (signal.SIGHUP, "graphs")],
)
def test_interrupted_exports_leave_nothing(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    done = struck(number, moment, "export", "random:tiny-llama", "-o", tmp_path / "bundle")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_replaced_by_the_next(tmp_path: Path) -> None:
    output, partial = tmp_path / "bundle", tmp_path / ".bundle.partial" / "new"
    done = struck(signal.SIGKILL, TENSOR, "export", "random:tiny-qwen2", "-o", output)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert partial.is_dir() and not output.exists()
    done = export("random:tiny-llama", "-o", output, "--seq-lens", "16")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_refusals(tmp_path: Path) -> None:
    unsupported = write_folder(tmp_path / "mamba", {"model_type": "mamba"}, {"x": np.zeros(2)})
    output = tmp_path / "bundle"
    cases = [
        ([unsupported], 4, "mamba"),
        (["random:tiny-nothing"], 2, "tiny"),
        (["random:tiny-llama", "--bits", "3"], 2, "bits"),
        (["random:tiny-llama", "--lora-targets", "nope_proj", "--seq-lens", "16"], 2, "q_proj"),
        (["random:tiny-llama", "--frobnicate"], 2, "frobnicate"),
    ]
    for arguments, code, said in cases:
        done = export(*arguments, "-o", output)
        assert done.returncode == code, (arguments, done.stderr)
        assert said in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not output.exists() and not (tmp_path / ".bundle.partial").exists(), arguments
    assert export("random:tiny-llama", "-o", output, "--seq-lens", "16").returncode == 0
    again = export("random:tiny-llama", "-o", output, "--seq-lens", "16")
    assert again.returncode == 2 and "--force" in again.stderr
