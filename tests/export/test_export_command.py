"""`ondevice export` as a user meets it: refusals and interruptions leave nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.runs import here

COMMAND = [sys.executable, "-m", "ondevice", "export"]


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    return here("export", *arguments)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_exports_leave_nothing(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "bundle"
    partial = tmp_path / ".bundle.partial" / "new"
    process = subprocess.Popen(
        [*COMMAND, "random:gemma3-270m", "-o", str(output)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # background jobs ignore it
    )
    while not (partial / "weights.bin").exists() or (partial / "weights.bin").stat().st_size == 0:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_replaced_by_the_next(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    process = subprocess.Popen([*COMMAND, "random:gemma3-270m", "-o", str(output)])
    while not (tmp_path / ".bundle.partial" / "new").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not output.exists()
    done = export("random:tiny-llama", "-o", output, "--seq-lens", "16")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_refusals(tmp_path: Path) -> None:
    unsupported = tmp_path / "mamba"
    unsupported.mkdir()
    (unsupported / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    save_file({"x": np.zeros(2, np.float32)}, unsupported / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    output = tmp_path / "bundle"
    cases = [
        ([unsupported], 4, "mamba"),
        ([sharded], 4, ""),
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
