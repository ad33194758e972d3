"""The export: cuts a checkpoint into blocks, quantizes and traces it, and writes a bundle.

Weights pass through memory one slice of a tensor at a time.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from export.config.export import ExportConfig
from export.cut.model import Cut, cut_model
from export.graph_files import no_progress, set_device, write_graphs
from export.original import Original
from export.passes.engine import ExportEngine
from export.recipe import linear_names, stored_bytes, stored_forms
from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint
from export.stored import QuantizedForm, StoredForm
from export.tensors import Tensors
from runtime.adapters.lora import LoraSettings
from runtime.bundle.float_manifest import float_tables
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import GRAPHS, TOKENIZER, Bundle, BundleWriter
from runtime.bundle.trusted import trust_graphs
from runtime.core.errors import StorageError
from runtime.core.notes import Progress
from runtime.core.version import __version__

MakeEngine = Callable[[Path], ExportEngine]


def export_bundle(
    config: ExportConfig, progress: Progress = no_progress, engine: MakeEngine | None = None
) -> Bundle:
    """Export `config.source` to a bundle at `config.output`.

    The engine, which is made for a folder of scratch files, runs the model: to calibrate the
    quantization, and to measure its quality. Without one the quality is not measured.

    Raises:
        BudgetError: the memory budget is too small to calibrate or to measure.
        BundleError: the checkpoint is damaged or its architecture unsupported.
        DataError: the calibration data cannot be used.
        StorageError: the disk is full, and nothing is left behind, or the user's cache folder
            cannot be written.
        UsageError: the destination exists, or the settings do not suit the model.
    """
    if engine is None and (config.calibrate is not None or config.bits == "auto"):
        raise ValueError("calibration and --bits auto run the model, which takes an engine")
    checkpoint = open_checkpoint(config.source, seed=config.seed)
    try:
        with BundleWriter(Path(config.output), config.force) as writer:
            return _export(config, checkpoint, writer, progress, engine)
    finally:
        checkpoint.close()


def _export(
    config: ExportConfig,
    checkpoint: Checkpoint,
    writer: BundleWriter,
    progress: Progress,
    engine: MakeEngine | None,
) -> Bundle:
    device = set_device(config.device)
    cut = cut_model(checkpoint.family, checkpoint.config)
    lora = _lora(config, cut)
    stored, kept = stored_forms(config, checkpoint, cut)
    _check_space(config, checkpoint, writer, stored)
    running = None if engine is None else engine(writer.place)

    def written(what: str, done: int, total: int) -> None:
        progress(what, done, total)
        if running is not None:
            running.check(f"while it wrote {what}")

    tensors = Tensors(checkpoint, writer, stored, kept, written)
    buckets = tuple(config.seq_lens)
    graphs = write_graphs(cut, buckets, writer.folder, GRAPHS, progress)
    files = {
        f"{TOKENIZER}/{name}": writer.file(f"{TOKENIZER}/{name}", data)
        for name, data in sorted(checkpoint.tokenizer_files().items())
    }
    first = cut.blocks[0]
    (lookup,) = cut.block_types[first.type].operations[0].matrices(first.tensor)
    vocabulary, width = checkpoint.shape(f"{lookup}.weight")
    provenance = {
        **checkpoint.provenance,
        "exporter": f"ondevice {__version__}",
        "mlx_lm": metadata.version("mlx-lm"),
        "settings": _settings(config),
    }
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    matrices, vectors, nbytes = float_tables(
        {name: tensors.shape(name) for name in stored},
        {
            name: shape
            for name, shape in shapes.items()
            if name.removesuffix(".weight") not in stored
        },
    )
    source = Manifest(
        mlx_version=metadata.version("mlx"),
        device=device,
        family=checkpoint.family,
        config=checkpoint.config,
        hidden_size=width,
        vocab_size=vocabulary,
        lora=msgspec.structs.replace(lora, targets=()),
        buckets=buckets,
        weights_nbytes=nbytes,
        weights_sha256="",
        matrices=matrices,
        vectors=vectors,
        block_types=cut.block_types,
        blocks=tuple(cut.blocks),
        graphs=graphs,
        files=files,
        provenance=provenance,
    )
    if config.graphs:
        trust_graphs(source, f"written by ondevice export to {writer.destination}")
    here = writer.folder
    original = Original(Bundle(here, source, here), checkpoint, running, config)
    if config.bits == "auto":
        provenance["bits"] = original.choose_bits(tensors)
    if config.calibrate is None:
        tensors.write(cut)
    else:
        provenance["calibration"] = original.calibrate(tensors, cut)
    if transcoded := _transcoded(tensors):
        provenance["transcoded"] = transcoded
    nbytes, digest = writer.finish_weights()
    manifest = msgspec.structs.replace(
        source,
        lora=lora,
        trainable=config.trainable,
        weights_nbytes=nbytes,
        weights_sha256=digest,
        matrices=tensors.matrices,
        vectors=tensors.vectors,
        provenance=provenance,
    )
    quality = original.quality_of(Bundle(here, manifest, here))
    if not config.graphs:
        shutil.rmtree(here / GRAPHS)
        manifest = msgspec.structs.replace(manifest, graphs={})
    return writer.commit(msgspec.structs.replace(manifest, quality=quality))


def _lora(config: ExportConfig, cut: Cut) -> LoraSettings:
    """The manifest's `lora`. Raises UsageError for a target that no linear layer has."""
    config.lora.check_targets(linear_names(cut))
    return config.lora


def _transcoded(tensors: Tensors) -> dict[str, int]:
    """How many matrices keep the values of a quantized checkpoint, by how they are stored."""
    return Counter(
        f"{one.bits} bits, {one.layout} groups of {one.group_size}, {one.scale_dtype} scales"
        for name, one in tensors.stored.items()
        if isinstance(one, QuantizedForm) and not tensors.is_quantized(name)
    )


def _check_space(
    config: ExportConfig,
    checkpoint: Checkpoint,
    writer: BundleWriter,
    stored: Mapping[str, StoredForm],
) -> None:
    """Raise StorageError if the disk has too little space, before anything is written."""
    needed = stored_bytes(checkpoint, stored)
    if config.bits == "auto":
        needed = round(needed * (1 + config.size_share))
    free = shutil.disk_usage(writer.folder).free
    if needed > free:
        raise StorageError(
            f"the bundle needs about {needed / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are "
            f"free at {writer.destination.parent}; make room or choose another --output"
        )


def _settings(config: ExportConfig) -> dict[str, Any]:
    """The settings that are not at their default, as the manifest records them."""
    values = {one.name: (getattr(config, one.name), one.default) for one in fields(config)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in values.items()
        if value != default
    }
