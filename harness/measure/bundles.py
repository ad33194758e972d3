"""Bundles with published shapes and random weights, exported once and used by every benchmark.

A bundle has its model's name. Invariant: an existing bundle is used only where `ondevice export
random:MODEL` would write the same; it is exported again where lengths are missing or MLX changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from harness.measure.command import ondevice
from runtime.bundle.store import MANIFEST, Bundle, open_bundle
from runtime.core.errors import UsageError
from runtime.core.notes import Note

_FREE = {"source", "output", "seq_lens", "device", "force"}  # settings that do not change weights
PROCESSES_DIFFER_BYTES = 300_000  # a benchmark's process may take more than that of `ondevice plan`
_MB = 1_000_000


def bundle_of(folder: Path, model: str, lengths: Sequence[int], note: Note) -> Path:
    """The bundle of a model in `folder` with graphs for `lengths`; it is exported where needed.

    Raises:
        UsageError: its place holds something else.
        OnDeviceError: it cannot be exported.
    """
    path = folder / model
    buckets = set(lengths)
    force = (path / MANIFEST).is_file()
    if force:
        bundle = open_bundle(path)
        _check(bundle, model)
        if buckets <= {*bundle.manifest.buckets}:
            return path
        buckets |= {*bundle.manifest.buckets}
    note(f"exporting {path} for {', '.join(map(str, sorted(buckets)))} tokens")
    flags = ["--seq-lens", ",".join(map(str, sorted(buckets))), *(["--force"] if force else [])]
    ondevice("export", f"random:{model}", "--output", str(path), *flags)
    return path


def smallest_megabytes(
    bundle: Path, method: str, length: int, compute_dtype: str = "float32"
) -> int:
    """The smallest budget under which ours trains in any process, in whole MB."""
    flags = [f"--method={method}", f"--max-seq-length={length}", "--budget=1000TB", "--json"]
    flags.append(f"--compute-dtype={compute_dtype}")
    plan: dict[str, int] = json.loads(ondevice("plan", str(bundle), *flags))
    return math.ceil((plan["minimum_bytes"] + PROCESSES_DIFFER_BYTES) / _MB)


def _check(bundle: Bundle, model: str) -> None:
    origin = bundle.manifest.provenance
    recorded = origin.get("settings", {})
    known = {key: str(value) for key, value in recorded.items() if key not in _FREE}  # as typed
    if (origin.get("kind"), origin.get("name")) != ("random", model) or known:
        odd = f" with {', '.join(sorted(known))} set" if known else ""
        raise UsageError(
            f"{bundle.path} holds {origin.get('name')}{odd}, not what `ondevice export "
            f"random:{model}` makes; move it away or choose other --bundles"
        )
