"""Writes a model as a bundle: the same layouts and graphs, and an adapter in the weights.

The integers of a matrix to which nothing is added are copied. Others are dequantized, added to, and
quantized again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from export.config.export import ExportConfig
from export.cut.model import Cut
from export.fused.checkpoint import SPACE
from export.fused.model import FusedCheckpoint
from export.recipe import stored_bytes, stored_forms
from export.stored import FloatForm
from export.tensors import Tensors
from runtime.bundle.manifest import Quality
from runtime.bundle.store import Bundle, BundleWriter
from runtime.core.notes import Progress

Measure = Callable[[Bundle], Quality | None]


def write_bundle(
    model: FusedCheckpoint,
    output: Path,
    bits: int | None,
    force: bool,
    measure: Measure,
    progress: Progress,
) -> Bundle:
    """Write a bundle of the model, and return it.

    Its graphs are those of the model's own bundle, so they may run wherever those may.

    Args:
        bits: of all matrices; None to store each as before.
        force: whether a bundle that is there is replaced.
        measure: returns the cost of fusing, given the unfinished bundle, for the new manifest.

    Raises:
        BundleError: a value is not finite, or too large for how it is stored.
        StorageError: the disk has too little space, and nothing is left behind.
        UsageError: there is something at `output` already, or a matrix cannot have so many bits.
    """
    manifest = model.bundle.manifest
    cut = Cut(dict(manifest.block_types), list(manifest.blocks))
    stored, copied = model.stored()
    if bits is not None:
        config = ExportConfig(source=str(model.bundle.path), output=str(output), bits=bits)
        stored, copied = stored_forms(config, model, cut)
    with BundleWriter(output, force) as writer:
        writer.check_space(stored_bytes(model, stored), SPACE)
        tensors = Tensors(model, writer, stored, copied, progress)
        tensors.write(cut)
        nbytes, digest = writer.finish_weights()
        writer.copy_files(model.bundle)
        floats = all(isinstance(form, FloatForm) for form in stored.values())
        fused = msgspec.structs.replace(
            manifest,
            weights_nbytes=nbytes,
            weights_sha256=digest,
            matrices=tensors.matrices,
            vectors=tensors.vectors,
            provenance={**manifest.provenance, "fused": model.provenance["fused"]},
            trainable=manifest.trainable if floats else "lora",
            quality=None,
        )
        quality = measure(Bundle(writer.folder, fused))
        return writer.commit(msgspec.structs.replace(fused, quality=quality))
