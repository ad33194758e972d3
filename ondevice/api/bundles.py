"""Making and opening bundles from Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec

from export.config.export import ExportConfig
from ondevice.api.process import hearing, prepare, refuse_others
from runtime.bundle import store
from runtime.bundle.manifest import Quality
from runtime.bundle.store import Bundle
from runtime.core.notes import Note, Progress, no_progress, warning


class ExportResult(msgspec.Struct, frozen=True, kw_only=True):
    """An exported bundle.

    bundle: its folder. bits_per_weight: with scales and biases.
    quality: how far its predictions are from the checkpoint's; None where it was not measured.
    """

    bundle: str
    weights_bytes: int
    bits_per_weight: float
    graphs: int
    graphs_bytes: int
    peak_footprint_bytes: int
    quality: Quality | None


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle, checking its manifest and every file's presence and size.

    `bundle.manifest` says what it holds; `bundle.verify()` compares every file with its checksum.

    Raises:
        BundleError: not a bundle, truncated, inconsistent, or not readable.
        UsageError: the path is not valid UTF-8.
    """
    return store.open_bundle(path)


def export_bundle(
    config: ExportConfig, *, on_progress: Progress = no_progress, on_note: Note | None = None
) -> ExportResult:
    """Convert a checkpoint to a bundle, as `ondevice export` does.

    on_progress(task, done, total) is called while it works, on_note(text) with lines for people.

    Raises:
        UsageError: the output exists, or there is no such checkpoint.
        BudgetError: the budget is too small, or was passed.
        BundleError: the checkpoint is damaged or not supported.
        StorageError: the disk is full, or the output cannot be written.
    """
    refuse_others(config, ExportConfig)
    prepare(keep_heap=False)
    return export(config, on_progress, hearing(on_note))


def export(config: ExportConfig, progress: Progress, note: Note) -> ExportResult:
    """Export under the configuration's budget, in a process that is set up for it."""
    from export.bundle import export_bundle as write_bundle
    from export.passes.engine import ExportEngine
    from runtime.machine.footprint import Meter

    with Meter(budget_bytes=config.budget_bytes) as meter:
        engine = partial(ExportEngine, meter, config.budget_bytes, progress, note)
        bundle = write_bundle(config, progress, engine, note)
    quality = bundle.manifest.quality
    if quality is not None and (hurt := quality.warning()):
        note(warning(hurt))
    manifest = bundle.manifest
    return ExportResult(
        bundle=str(bundle.path),
        weights_bytes=manifest.weights_nbytes,
        bits_per_weight=manifest.bits_per_weight,
        graphs=len(manifest.graphs),
        graphs_bytes=sum(graph.nbytes for graph in manifest.graphs.values()),
        peak_footprint_bytes=meter.peak_bytes,
        quality=quality,
    )
