"""The export: cuts a checkpoint into blocks, quantizes and traces it, and writes a bundle.

Weights pass through memory one slice of a tensor at a time.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from export.config.export import ExportConfig
from export.cut.model import Cut, cut_model
from export.cut.unread import refuse_unread
from export.graph_files import set_device, write_graphs
from export.original import Original
from export.passes.engine import ExportEngine
from export.recipe import expert_names, linear_names, stored_bytes, stored_forms
from export.sources.families import check_lengths
from export.sources.misread import MisreadError, blamed
from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint
from export.sources.tokenizer import tokenizer_warnings
from export.sources.verified import unverified
from export.stored import QuantizedForm
from export.tensors import Tensors
from runtime.arrays.stored import File, Graph
from runtime.bundle.manifest import WARNINGS, Manifest
from runtime.bundle.store import GRAPHS, TOKENIZER, Bundle, BundleWriter
from runtime.bundle.trusted import trust_graphs
from runtime.core.notes import Note, Progress, no_progress, silent, warning
from runtime.core.version import __version__
from runtime.data.tokenizer_files import VOCABULARY
from runtime.storage.row_weights import float_tables

MakeEngine = Callable[[Path], ExportEngine]
NO_TOKENIZER = (
    "the checkpoint has no tokenizer: data of text, generate and chat need one (random:SEED is "
    "data that needs none); put the model's tokenizer.json beside its weights and export again"
)


def export_bundle(
    config: ExportConfig,
    progress: Progress = no_progress,
    make_engine: MakeEngine | None = None,
    note: Note = silent,
) -> Bundle:
    """Export `config.source` to a bundle at `config.output`.

    `make_engine` makes an engine for a folder of scratch files. The engine runs the model: to
    calibrate the quantization, and to measure its quality. Without it the quality is not measured.

    Raises:
        BudgetError: the memory budget is too small to calibrate or to measure.
        BundleError: the checkpoint is damaged or its architecture unsupported.
        DataError: the calibration data cannot be used.
        StorageError: the disk is full, and nothing is left behind, or the user's cache folder
            cannot be written.
        UsageError: the destination exists, the settings do not suit the model, or its type has not
            been verified.
    """
    if make_engine is None and config.calibrate is not None:
        raise ValueError("calibration runs the model, which takes an engine")
    checkpoint = open_checkpoint(config.source, seed=config.seed)
    try:
        tokenizer = checkpoint.tokenizer_files()
        embedded = checkpoint.config["vocab_size"]
        odd = tokenizer_warnings(tokenizer, embedded, checkpoint.given)
        odd += unverified(checkpoint, config.unverified)
        for text in (*checkpoint.warnings, *odd):
            note(warning(text))
        if odd:
            checkpoint.provenance[WARNINGS] = odd
        if VOCABULARY not in tokenizer and checkpoint.provenance["kind"] != "random":
            note(NO_TOKENIZER)
        with BundleWriter(Path(config.output), config.force) as writer:
            return _export(config, checkpoint, tokenizer, writer, progress, make_engine)
    finally:
        checkpoint.close()


def _export(
    config: ExportConfig,
    checkpoint: Checkpoint,
    tokenizer: dict[str, bytes],
    writer: BundleWriter,
    progress: Progress,
    make_engine: MakeEngine | None,
) -> Bundle:
    check_lengths(checkpoint.config, config.seq_lens)
    device = set_device(config.device)
    source = str(checkpoint.provenance["name"])
    cut = _cut(checkpoint, source)
    refuse_unread(checkpoint.family, checkpoint.config, checkpoint.given, source, config.seq_lens)
    config.lora.check_targets(linear_names(cut, outside=True), expert_names(cut))
    stored, copied = stored_forms(config, checkpoint, cut)
    writer.check_space(stored_bytes(checkpoint, stored))
    engine = None if make_engine is None else make_engine(writer.place)

    def report_and_check(part: str, done: int, total: int) -> None:
        progress(part, done, total)
        if engine is not None:
            engine.check(f"while it wrote {part}")

    graphs = write_graphs(cut, tuple(config.seq_lens), device, writer.folder, progress)
    files = {
        f"{TOKENIZER}/{name}": writer.file(f"{TOKENIZER}/{name}", data)
        for name, data in sorted(tokenizer.items())
    }
    tensors = Tensors(checkpoint, writer, stored, copied, report_and_check)
    manifest = _source_manifest(config, tensors, cut, device, graphs, files)
    if config.graphs:
        trust_graphs(manifest, f"written by ondevice export to {writer.destination}")
    folder = writer.folder
    original = Original(Bundle(folder, manifest, folder), checkpoint, engine, config)
    facts = _write_tensors(config, cut, original, tensors)
    nbytes, digest = writer.finish_weights()
    manifest = msgspec.structs.replace(
        manifest,
        lora=config.lora,
        trainable=config.trainable,
        weights_nbytes=nbytes,
        weights_sha256=digest,
        matrices=tensors.matrices,
        vectors=tensors.vectors,
        provenance={**manifest.provenance, **facts},
    )
    quality = original.quality_of(Bundle(folder, manifest, folder))
    if not config.graphs:
        shutil.rmtree(folder / GRAPHS)
        manifest = msgspec.structs.replace(manifest, graphs={})
    return writer.commit(msgspec.structs.replace(manifest, quality=quality))


def _cut(checkpoint: Checkpoint, where: str) -> Cut:
    """The checkpoint's model in blocks; a BundleError names settings of a wrong type."""
    try:
        return cut_model(checkpoint.family, checkpoint.config)
    except MisreadError as problem:
        if not isinstance(problem.__cause__, TypeError | ArithmeticError):
            raise
        cut = partial(cut_model, checkpoint.family)
        raise blamed(checkpoint.config, cut, problem, where) from problem


def _source_manifest(
    config: ExportConfig,
    tensors: Tensors,
    cut: Cut,
    device: str,
    graphs: dict[str, Graph],
    files: dict[str, File],
) -> Manifest:
    """The manifest of the checkpoint's own model: all matrices are floats, and there is no LoRA."""
    checkpoint = tensors.checkpoint
    matrices = {name: tensors.shape(name) for name in tensors.stored}
    vectors = {
        name: checkpoint.shape(name)
        for name in checkpoint.names()
        if name.removesuffix(".weight") not in matrices
    }
    float_matrices, float_vectors, nbytes = float_tables(matrices, vectors)
    embedding = cut.blocks[0]
    table, *_ = cut.block_types[embedding.type].operations[0].matrices(embedding.tensor)
    vocabulary, width = matrices[table]
    return Manifest(
        mlx_version=metadata.version("mlx"),
        device=device,
        family=checkpoint.family,
        config=checkpoint.config,
        hidden_size=width,
        vocab_size=vocabulary,
        lora=msgspec.structs.replace(config.lora, targets=()),
        buckets=tuple(config.seq_lens),
        weights_nbytes=nbytes,
        weights_sha256="",
        matrices=float_matrices,
        vectors=float_vectors,
        block_types=cut.block_types,
        blocks=tuple(cut.blocks),
        graphs=graphs,
        files=files,
        provenance={
            **checkpoint.provenance,
            "exporter": f"ondevice {__version__}",
            "mlx_lm": metadata.version("mlx-lm"),
            "settings": _settings(config),
        },
    )


def _write_tensors(
    config: ExportConfig, cut: Cut, original: Original, tensors: Tensors
) -> dict[str, Any]:
    """Write all tensors. Returns the facts about it that the manifest's provenance has."""
    facts: dict[str, Any] = {}
    if config.calibrate is None:
        tensors.write(cut)
    else:
        facts["calibration"] = original.calibrate(tensors, cut)
    if transcoded := _transcoded(tensors):
        facts["transcoded"] = transcoded
    return facts


def _transcoded(tensors: Tensors) -> dict[str, int]:
    """How many matrices are copied from a quantized checkpoint, by stored form."""
    return Counter(
        f"{form.bits} bits, {form.layout} groups of {form.group_size}, {form.scale_dtype} scales"
        for name, form in tensors.stored.items()
        if isinstance(form, QuantizedForm) and not tensors.is_quantized(name)
    )


def _settings(config: ExportConfig) -> dict[str, Any]:
    """The settings that are not at their default, as the manifest records them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(config).items()
        if config.was_given(name)
    }
