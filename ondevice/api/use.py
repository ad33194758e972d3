"""Evaluating and generating from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.api.process import hearing, prepare, refuse_others
from runtime.bundle.manifest import Quality
from runtime.config.evaluate import EvalConfig
from runtime.config.generate import GenerateConfig
from runtime.core.errors import BundleError, UsageError
from runtime.core.notes import Note, Progress, no_progress

if TYPE_CHECKING:
    from runtime.run.results import EvaluationResult, Generation


def evaluate(
    config: EvalConfig, *, on_progress: Progress = no_progress, on_note: Note | None = None
) -> EvaluationResult:
    """Measure the loss or labels of a bundle, with or without an adapter, as `ondevice eval` does.

    on_progress(task, done, total) counts rows, on_note(text) receives lines for people. A loss that
    is not finite is None, and no error.

    Raises:
        UsageError: rows are longer than the bundle has graphs for, or `config` names a source.
        BudgetError: the budget is too small, or was passed.
        BundleError, DataError: the bundle, the adapter or the data cannot be used.
    """
    refuse_others(config, EvalConfig)
    if config.source is not None:
        raise UsageError("a source is for compare_with_source(config); leave it out")
    prepare()
    from runtime.run.evaluate import run_eval
    from runtime.run.results import Events

    return run_eval(config, Events(note=hearing(on_note), evaluation=on_progress))


def compare_with_source(
    config: EvalConfig, *, on_progress: Progress = no_progress, on_note: Note | None = None
) -> Quality:
    """Measure how far a bundle's predictions are from those of the checkpoint it was exported from.

    `ondevice eval --source CHECKPOINT` does the same.
    on_progress(task, done, total) counts blocks, on_note(text) receives lines for people.

    Raises:
        UsageError: `config` names no source, or a checkpoint that is not that of the bundle.
        BudgetError: the budget is too small, or was passed.
        BundleError, DataError: the bundle, the checkpoint or the data cannot be used.
    """
    refuse_others(config, EvalConfig)
    if config.source is None:
        raise UsageError("there is nothing to compare with: give the checkpoint as source")
    prepare()
    return beside_source(config, on_progress, hearing(on_note))


def beside_source(config: EvalConfig, progress: Progress, note: Note) -> Quality:
    """Compare a bundle with its checkpoint, in a process that is set up for it."""
    from export.original import original_of
    from export.passes.engine import Compared, ExportEngine
    from export.sources.open import open_checkpoint
    from runtime.data.source import TokenSource, reading_of
    from runtime.machine.footprint import Meter
    from runtime.run.session import open_checked

    assert config.source is not None
    bundle = open_checked(config.bundle, config.device, note)
    budget = config.budget_bytes
    seed = bundle.manifest.provenance.get("seed", 0)  # of random:PRESET
    if not isinstance(seed, int):
        raise BundleError(f"{bundle.path}: its provenance has the seed {seed!r:.40}")
    with (
        open_checkpoint(config.source, seed=seed) as checkpoint,
        Meter(budget_bytes=budget) as meter,
        tempfile.TemporaryDirectory() as scratch,
    ):
        engine = ExportEngine(meter, budget, progress, note, Path(scratch))
        original = original_of(bundle, checkpoint)
        held_out = TokenSource("eval.tokens", config.data, "valid", reading_of(config))
        rows = engine.first_rows(bundle, held_out, config.max_seq_length, config.eval_rows)
        own = Compared(original, checkpoint)
        return engine.compare(own, Compared(bundle), rows, config.data)


def generate(
    config: GenerateConfig,
    *,
    on_text: Callable[[str], None] | None = None,
    on_note: Note | None = None,
) -> Generation:
    """Continue a prompt, with or without an adapter, as `ondevice generate` does.

    on_text(piece) receives the continuation as it grows, on_note(text) lines for people.

    Raises:
        UsageError: the prompt is too long.
        BudgetError: the budget is too small, or was passed.
        BundleError, DataError: the bundle or the adapter cannot be used, or has no tokenizer.
    """
    refuse_others(config, GenerateConfig)
    prepare()
    from runtime.run.generate import Generating

    generating = Generating(config, hearing(on_note))
    with closing(generating):  # also where `on_text` raises
        for piece in generating:
            if on_text is not None and piece:
                on_text(piece)
    return generating.result
