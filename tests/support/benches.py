"""The bundle that benchmarks of a tiny model use."""

from __future__ import annotations

from pathlib import Path

from harness.measure.bundles import bundle_of

MODEL = "tiny-qwen2"


def exported_for_16(folder: Path) -> None:
    """Its bundle for 16 tokens, in a folder of bundles."""
    folder.mkdir()
    bundle_of(folder, MODEL, (16,), lambda text: None)
