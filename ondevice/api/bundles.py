"""Making and opening bundles from Python."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from export.config.export import ExportConfig
from ondevice.api.process import Note, Progress, Said, prepare, silent
from ondevice.api.results import ExportResult
from runtime.bundle import store
from runtime.bundle.store import Bundle
from runtime.core.notes import warning


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle, checking its manifest and every file's presence and size.

    `bundle.manifest` says what it holds; `bundle.verify()` compares every file with its checksum.

    Raises:
        BundleError: not a bundle, truncated, inconsistent, or not readable.
        UsageError: the path is not valid UTF-8.
    """
    return store.open_bundle(path)


def export_bundle(
    config: ExportConfig, *, on_progress: Progress = silent, on_note: Note | None = None
) -> ExportResult:
    """Convert a checkpoint to a bundle, as `ondevice export` does.

    on_progress(what, done, total) is called while it works, on_note(text) with lines for people.

    Raises:
        UsageError: the output exists, or there is no such checkpoint.
        BudgetError: the budget is too small, or was passed.
        BundleError: the checkpoint is damaged or not supported.
        StorageError: the disk is full, or the output cannot be written.
    """
    prepare(keep_heap=False)
    return export(config, on_progress, Said(on_note))


def export(config: ExportConfig, progress: Progress, said: Said) -> ExportResult:
    """Export under the configuration's budget, in a process that is set up for it."""
    from export.bundle import export_bundle as write_bundle
    from export.passes.engine import ExportEngine
    from runtime.machine.footprint import Meter

    with Meter(budget_bytes=config.budget_bytes) as meter:
        engine = partial(ExportEngine, meter, config.budget_bytes, progress, said.note)
        bundle = write_bundle(config, progress, engine)
    quality = bundle.manifest.quality
    if quality is not None and (hurt := quality.warning()):
        said.note(warning(hurt))
    return ExportResult(bundle, quality, meter.peak_bytes, said.notes)
