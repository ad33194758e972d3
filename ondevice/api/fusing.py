"""Fusing from Python: an adapter becomes part of the weights, and the cost is measured."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from export.config.fuse import FuseConfig
from ondevice.api.process import hearing, prepare, refuse_others
from runtime.bundle.manifest import Quality
from runtime.bundle.store import Bundle
from runtime.core.errors import BudgetError, UsageError
from runtime.core.notes import Note, Progress, no_progress, warning

if TYPE_CHECKING:
    from export.fused.model import FusedCheckpoint, LowRank
    from export.passes.engine import ExportEngine
    from export.stored import FloatType
    from runtime.arrays.weight_source import RowReader
    from runtime.engine.sample import Row
    from runtime.methods.adapters import Adapters

LOST_NATS = 0.05
"""Nats per token, of loss or KL divergence, from which fusing counts as having lost much."""


class FuseResult(msgspec.Struct, frozen=True, kw_only=True):
    """A model with an adapter in its weights, written elsewhere.

    weights_bytes: of the files with the weights. adapted_matrices: those to which something was
    added. quality: compares it with the bundle and the adapter, whose loss is `source_loss`; None
    where it was not measured.
    """

    output: str
    format: str
    weights_bytes: int
    adapted_matrices: int
    peak_footprint_bytes: int
    quality: Quality | None


def fuse(
    config: FuseConfig, *, on_progress: Progress = no_progress, on_note: Note | None = None
) -> FuseResult:
    """Add an adapter to the weights of its bundle, as `ondevice fuse` does.

    on_progress(task, done, total) is called while it works, on_note(text) with lines for people.

    Raises:
        UsageError: the output exists, or the format cannot hold the model.
        BudgetError: the process has passed the budget.
        BundleError, DataError: the bundle, the adapter or the data cannot be used.
        StorageError: the disk has too little space, and nothing is left behind.
    """
    refuse_others(config, FuseConfig)
    prepare(keep_heap=False)
    return fuse_as(config, on_progress, hearing(on_note))


def fuse_as(config: FuseConfig, progress: Progress, note: Note) -> FuseResult:
    """Fuse under the configuration's budget, in a process that is set up for it."""
    from export.fused.model import FusedCheckpoint
    from export.passes.engine import ExportEngine
    from runtime.machine.footprint import Meter
    from runtime.methods.adapters import Adapters
    from runtime.run.lora import refuse_prefix, to_apply
    from runtime.run.session import open_verified

    adapter = None if config.adapter is None else Path(config.adapter)
    with (
        Meter(budget_bytes=config.budget_bytes) as meter,
        tempfile.TemporaryDirectory() as scratch,
    ):
        bundle = open_verified(config.bundle)
        if Path(config.output).resolve() == bundle.path.resolve():
            raise UsageError(f"{config.output} is the bundle itself; write to another directory")
        adapted = to_apply(adapter, bundle, note)
        if adapter is not None:
            refuse_prefix(adapted.manifest.lora, adapter, "no weights can hold it")
        adapters = Adapters.applied(adapted.manifest, adapter)
        engine = ExportEngine(meter, config.budget_bytes, progress, note, Path(scratch))
        cost = _Cost(config, engine, adapted, adapters, note)
        cost.read_rows()

        def written(task: str, done: int, total: int) -> None:
            progress(task, done, total)
            engine.check(f"while it wrote {task}")

        with FusedCheckpoint(bundle, _added(adapters)) as model:
            size = _FORMATS[config.format](config, model, cost, written)
            count = len(model.added)
    if cost.quality is not None and (lost := _lost(cost.quality)):
        note(warning(lost))
    return FuseResult(
        output=config.output,
        format=config.format,
        weights_bytes=size,
        adapted_matrices=count,
        peak_footprint_bytes=meter.peak_bytes,
        quality=cost.quality,
    )


def _lost(quality: Quality) -> str:
    """A warning with the way out where fusing has lost much, else an empty text."""
    lost = quality.loss - quality.source_loss
    if max(lost, quality.divergence) < LOST_NATS:
        return ""
    return (
        f"fusing has changed the model: its loss is {lost:+.3f} nats, and its predictions are "
        f"{quality.divergence:.2g} nats per token (KL divergence) away. The weights are rounded "
        "again after the adapter is added: keep the adapter beside the bundle, or fuse with more "
        "bits (--bits 8), or into floats (--format hf)"
    )


def _added(adapters: Adapters) -> dict[str, LowRank]:
    """The low-rank addition to each matrix, by its name; the arrays are not copied."""
    from export.fused.model import LowRank
    from runtime.arrays.arrays import view

    names = [name.removesuffix(".lora_a") for name in adapters.tensors if name.endswith(".lora_a")]
    looked_up = adapters.manifest.adapted(adapters.manifest.blocks[0])
    return {
        name: LowRank(
            view(adapters.tensors[f"{name}.lora_a"]),
            view(adapters.tensors[f"{name}.lora_b"]),
            adapters.scale,
            name in looked_up,
        )
        for name in names
    }


@dataclass
class _Cost:
    """Measures a fused model beside its bundle and adapter."""

    config: FuseConfig
    engine: ExportEngine
    bundle: Bundle
    adapters: Adapters
    note: Note
    quality: Quality | None = None
    _rows: Sequence[Row] = field(default_factory=tuple)
    _text: str = ""

    def read_rows(self) -> None:
        """Read the rows to measure with, if any; bad data are refused at once."""
        from export.original import OWN_TEXT, own_text
        from runtime.data.source import TokenSource, reading_of

        config, manifest = self.config, self.bundle.manifest
        if not config.quality:
            return
        if config.data is not None:
            self._text = config.data
            source = TokenSource("fuse.tokens", config.data, "valid", reading_of(config))
            length, count = config.max_seq_length, config.eval_rows
            self._rows = self.engine.first_rows(self.bundle, source, length, count)
        elif manifest.files:
            self._text, self._rows = OWN_TEXT, own_text(self.engine, self.bundle)
        else:
            self.note(
                f"the loss is not measured: {self.bundle.path} has no tokenizer, so it reads no "
                "text; --data random:0 measures it on random tokens"
            )

    def measure(self, fused: Callable[[Bundle], Bundle], reader: RowReader | None) -> None:
        """Measure the model that `fused` makes of the runnable bundle; `reader` has its weights.

        Where it cannot be run here, the written model is good all the same: the reason is said.
        """
        if not self._rows:
            return
        from export.passes.engine import Compared
        from runtime.run.traced_graphs import with_graphs

        bundle = with_graphs(self.bundle, self.config.device, self.note)
        other = fused(bundle)
        plain = msgspec.structs.replace(bundle.manifest.lora, targets=())
        try:
            before = Compared(bundle, adapters=self.adapters)
            after = Compared(other.with_lora(plain), reader)
            self.quality = self.engine.compare(before, after, self._rows, self._text)
        except BudgetError as problem:
            self.engine.check("while it measured the loss")
            self.note(f"the loss was not measured: {problem}; --no-quality leaves it out")


def _checkpoint(config: FuseConfig, model: FusedCheckpoint, cost: _Cost, progress: Progress) -> int:
    from export.fused.checkpoint import write_checkpoint

    output, dtype = Path(config.output), cast("FloatType", config.dtype)
    size = write_checkpoint(model, output, dtype, config.shard_bytes, config.force, progress)
    _measure_written(cost, output)
    return size


def _measure_written(cost: _Cost, path: Path) -> None:
    """Measure a checkpoint, as it is read back from its files."""
    from export.sources.open import open_checkpoint
    from runtime.storage.row_weights import float_manifest

    def in_floats(bundle: Bundle) -> Bundle:
        return replace(bundle, manifest=float_manifest(bundle.manifest))

    with open_checkpoint(str(path)) as checkpoint:
        cost.measure(in_floats, checkpoint)


def _gguf(config: FuseConfig, model: FusedCheckpoint, cost: _Cost, progress: Progress) -> int:
    from export.fused.gguf import write_gguf

    dtype = cast("FloatType", config.dtype)
    path = write_gguf(model, Path(config.output), dtype, config.force, progress)
    _measure_written(cost, path)
    return path.stat().st_size


def _bundle(config: FuseConfig, model: FusedCheckpoint, cost: _Cost, progress: Progress) -> int:
    from export.fused.bundle import write_bundle

    def measured(unfinished: Bundle) -> Quality | None:
        manifest = unfinished.manifest
        weights = {
            name: getattr(manifest, name)
            for name in ("weights_nbytes", "weights_sha256", "matrices", "vectors")
        }

        def fused(bundle: Bundle) -> Bundle:
            running = msgspec.structs.replace(bundle.manifest, **weights)
            return replace(bundle, path=unfinished.path, manifest=running)

        cost.measure(fused, None)
        return cost.quality

    bundle = write_bundle(model, Path(config.output), config.bits, config.force, measured, progress)
    return bundle.manifest.weights_nbytes


_Write = Callable[[FuseConfig, "FusedCheckpoint", _Cost, Progress], int]
_FORMATS: dict[str, _Write] = {"hf": _checkpoint, "gguf": _gguf, "bundle": _bundle}
