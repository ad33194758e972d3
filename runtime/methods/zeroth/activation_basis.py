"""Bases of what reaches each adapted matrix: the directions in which its inputs are largest.

The gradient of a matrix W (R, C) is dy^T x, so its rows lie in the span of the inputs x (T, C).
AGZO (Lin et al., arXiv 2601.17261) finds an orthonormal basis Q (C, r) of that span's dominant part
by power iterations on x^T x, summed over rows of data:

    Q <- orth(x^T x Q)

The adapters' A (C, r) holds Q. x^T x is never stored: each iteration runs a block forward again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from runtime.arrays.stored import Block
from runtime.arrays.values import InputObserver
from runtime.core.errors import DivergedError, UsageError
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.engine.visits import visit, visits
from runtime.methods.adapters import Adapters
from runtime.storage.activations import Activations

ITERATIONS = 4  # AGZO takes "a few"
PASSES = ITERATIONS + 1  # of each row through an adapted block: the last one has the basis

Sums = dict[str, mx.array]  # x^T x Q (C, r) by the matrix's relative name


def set_bases(
    model: Model, adapters: Adapters, rows: Sequence[Sample], activations: Activations
) -> None:
    """Replace every A, in which the iterations begin, by a basis of its matrix's inputs.

    Every B must be zero, so that the inputs do not depend on A. `activations` has a slot for each
    row.

    Raises:
        UsageError: the rank is larger than a matrix has columns.
        DivergedError: the inputs are not finite.
    """
    manifest = adapters.manifest
    for name, (columns, rank) in Adapters.shapes(manifest).items():
        if name.endswith("lora_a") and rank > columns:
            raise UsageError(
                f"--lora-rank {rank} is too large for a basis of the inputs of {name}, which have "
                f"{columns} values; give {columns} or less"
            )
    with visit(model, 0):
        for slot, row in enumerate(rows):
            activations.put(0, slot, model.embed(row.inputs))
    last = max((at for at, block in enumerate(model.blocks) if manifest.adapted(block)), default=0)
    for layer in visits(model, range(1, last + 1)):
        block = layer.block
        if manifest.adapted(block):
            for _ in range(ITERATIONS):
                _iterate(model, block, adapters, rows, activations)
        for slot, row in enumerate(rows):
            loras = adapters.loras(block)
            y = model.forward(block, activations.get(0, slot), loras, row.offsets)
            activations.put(0, slot, y)


def _iterate(
    model: Model,
    block: Block,
    adapters: Adapters,
    rows: Sequence[Sample],
    activations: Activations,
) -> None:
    """One power iteration for all matrices of a block."""
    sums: Sums = {}
    loras = adapters.loras(block)
    for slot, row in enumerate(rows):
        watched = {
            name: replace(
                lora, observer=InputObserver(partial(_add, sums, name, lora.a), len(row.inputs))
            )
            for name, lora in loras.items()
        }
        model.forward(block, activations.get(0, slot), watched, row.offsets)
    del loras
    for name in list(sums):
        tensor = f"{block.tensor(name)}.lora_a"
        product = np.array(sums.pop(name), np.float64)
        if not np.isfinite(product).all():
            raise DivergedError(f"the inputs of {block.tensor(name)} are not finite")
        adapters.tensors[tensor] = mx.array(np.linalg.qr(product)[0].astype(np.float32))


def _add(sums: Sums, name: str, q: mx.array, x: mx.array) -> None:
    """Add x^T (x Q) of inputs x (T, C) to the sum of a matrix."""
    part = ((x @ q).T @ x).T  # not x^T (x Q): threads of a BLAS would pack all of x
    sums[name] = mx.contiguous(part + sums[name] if name in sums else part)
    mx.eval(sums[name])
