"""The commands from export to replay, on Linux that looks like macOS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.darwin import PRETENDS
from support.forks import ROOT, import_path

COMMANDS = """
import contextlib, io, json, os, sys
from support import darwin

darwin.pretend()

from ondevice.cli.main import main

assert sys.platform == "darwin" and not hasattr(os, "posix_fallocate")
found = {}
for words in json.loads(sys.argv[1]):
    darwin.FLUSHES.clear()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(words)
    found[words[0] + words[-1]] = [code, said.getvalue(), *map(darwin.FLUSHES.count, (51, 85))]
print(json.dumps(found))
"""
SIZES = ["--budget=100MB", "--max-seq-length=32", "--steps=2", "--save-every=1"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS need not be imitated there")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_run_as_on_macos(tmp_path: Path) -> None:
    train = ["train", "tiny", "--data=random:0", *SIZES]
    words = [
        ["doctor", "--json"],
        ["export", "random:tiny-gemma3", "--seq-lens=16,32", "-o", "tiny"],
        [*train, "-o", "exact"],
        [*train, "--method=mezo", "-o", "scalars"],
        ["replay", "--json", "scalars"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(words)],
        cwd=tmp_path,
        env={**os.environ, PRETENDS: "1", "PYTHONPATH": import_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(code == 0 for code, *_ in found.values()), found
    findings = {one["name"]: one for one in json.loads(found["doctor--json"][1])["findings"]}
    assert "macOS 15.0" in findings["platform"]["text"]
    assert "caffeinate" in findings["sleep"]["text"]
    assert json.loads(found["replayscalars"][1])["identical"]
    assert found["exporttiny"][2] > 0
    for run in ("trainexact", "trainscalars"):
        _, _, whole, order_only = found[run]
        assert whole > 0 and order_only > 0  # saves reach the drive, logs keep their order
