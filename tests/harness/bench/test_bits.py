"""The benchmark of 4-bit and 8-bit weights: both bundles, both methods, warm and cold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.bench import bits
from harness.bench.bench import bench, to_text
from harness.config.bench import BenchConfig
from harness.measure.bundles import bundle_of
from runtime.bundle.store import open_bundle

MODEL = "tiny-qwen2"


def test_bits(tmp_path: Path) -> None:
    config = BenchConfig(
        name="bits",
        bundles=str(tmp_path),
        models=MODEL,
        seq_lens="16",
        budget="1GB",
        steps=2,
        repeats=1,
        output=str(tmp_path / "found.json"),
    )
    report = bench(config, lambda text: None)
    row = report["rows"][0]
    assert row["failed"] is None and row["weights_bytes"]["4"] < row["weights_bytes"]["8"]
    found = {(one["method"], one["bits"], one["cold"]): one for one in row["variants"]}
    assert len(found) == 8
    for (method, many, cold), one in found.items():
        if cold and one["failed"]:
            assert "cache" in one["failed"]  # where the system cannot drop pages
            continue
        assert one["failed"] is None, one["name"]
        few = found[method, 4, cold]
        if not few["failed"]:
            same = one["processes"][0]["losses"] == few["processes"][0]["losses"]
            assert same == (many == 4)  # the bundles do hold other values
            assert (one["ratio"] is None, one["memory"] is None) == (many == 4,) * 2
    stored = {}
    for many in (bits.FEW, bits.MANY):
        matrices = open_bundle(tmp_path / f"{MODEL}-{many}").manifest.matrices
        stored[many] = {one.bits for one in matrices.values()}
    assert stored == {"4": {4, 8}, "8": {8}}
    assert "Training from 4 and from 8 bits" in to_text(report)


def test_a_bundle_of_other_bits_is_used_again(tmp_path: Path) -> None:
    notes: list[str] = []
    first, again = (bundle_of(tmp_path, MODEL, (16,), notes.append, {"bits": "8"}) for _ in "12")
    assert first == again and len(notes) == 1


@pytest.mark.parametrize("feature", ["single-read", "deferred-update"])
def test_features_that_a_method_does_not_have(tmp_path: Path, feature: str) -> None:
    bundle = bundle_of(tmp_path, MODEL, (16,), print)
    words = ["--method=mebp", "--max-seq-length=16", f"--without={feature}"]
    words += [f"--scratch={tmp_path}"]
    command = [sys.executable, "-m", "harness.bench.ablation_process", str(bundle), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "mebp has no such feature" in done.stderr
