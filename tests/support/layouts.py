"""Bundles of which each matrix is stored in a layout of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from oracles import whole_model as reference

from export.quantize.nearest import quantize_rows
from export.stored import QuantizedForm
from runtime.arrays.stored import ALIGNMENT, FLOAT_BITS, PAGE, Extent, Matrix
from runtime.bundle.manifest import manifest_bytes
from runtime.bundle.store import MANIFEST, WEIGHTS, Bundle
from runtime.storage.weights import Weights
from support.bundles import links, runnable
from support.lengths import pairs
from support.models import FAMILIES, MIXERS


class Layout(NamedTuple):
    """How a matrix is stored: "symmetric" and "affine" with bits and groups, or a float type."""

    name: str
    bits: int = 0
    group: int = 0

    def fits(self, columns: int) -> bool:
        return not self.group or columns % self.group == 0


QUANTIZED = [
    Layout(name, bits, group)
    for group in (128, 64, 32)  # those that fit the fewest matrices first
    for bits in (4, 8)
    for name in ("symmetric", "affine")
]
FLOATS = [Layout(dtype) for dtype in FLOAT_BITS]
MIXED = [*QUANTIZED, *FLOATS]
LAYOUTS = {"mixed": MIXED, **{layout.name: [layout] for layout in FLOATS}}
"""What `tiny(family, layouts=NAME)` makes of a bundle: see `relaid`."""

STORED = [(family, layouts) for family in FAMILIES for layouts in ("", "mixed")]
"""Every family with its matrices as they were exported, and in all layouts in one model."""


STORED_IN_TURN = [*pairs(FAMILIES, ("", "mixed")), *((family, "") for family in MIXERS)]
"""The same; half of them, of which one of each family, in the gate; and what is no attention."""


WITH_EXPERTS = ("qwen3-moe", "mixed")


def relaid(bundle: Bundle, folder: Path, layouts: list[Layout]) -> Bundle:
    """A copy of a bundle in which each matrix has the least used of the layouts that fit it.

    Every graph, vector and program is that of the bundle; the values are those that it has, rounded
    to their new layout.
    """
    weights, blob = Weights(bundle), _Blob()
    manifest = bundle.manifest
    chosen = dict(zip(manifest.matrices, assigned(manifest.matrices, layouts), strict=True))
    vectors, matrices = {}, {}
    for name, extent in manifest.vectors.items():
        vectors[name] = blob.add(np.array(weights.vector(name)), extent.dtype)
    for name, matrix in manifest.matrices.items():
        blob.fill(PAGE)
        values = np.array(reference.dequantized(weights, matrix))
        matrices[name] = _stored(values, chosen[name], blob.add)
    changed = msgspec.structs.replace(
        manifest,
        vectors=vectors,
        matrices=matrices,
        weights_nbytes=len(blob.data),
        weights_sha256=hashlib.sha256(blob.data).hexdigest(),
    )
    links(bundle, folder)
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_bytes(blob.data)
    (folder / MANIFEST).write_bytes(manifest_bytes(changed))
    return runnable(folder)


def assigned(matrices: dict[str, Matrix], layouts: list[Layout]) -> Iterator[Layout]:
    """For each matrix the layout that fewest matrices before it have, of those that fit it."""
    uses = dict.fromkeys(layouts, 0)
    for matrix in matrices.values():
        fitting = [layout for layout in layouts if layout.fits(matrix.columns)]
        best = min(fitting, key=uses.__getitem__)
        uses[best] += 1
        yield best


class _Blob:
    def __init__(self) -> None:
        self.data = b""

    def fill(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % alignment)

    def add(self, values: np.ndarray, dtype: str) -> Extent:
        self.fill(ALIGNMENT)
        start = len(self.data)
        self.data += values.tobytes()
        return Extent(start, values.nbytes, dtype, values.shape)


def _stored(values: np.ndarray, layout: Layout, add: Callable[[np.ndarray, str], Extent]) -> Matrix:
    rows, columns = values.shape
    name, bits, group = layout
    if name in FLOAT_BITS:
        rounded = mx.array(values).astype(getattr(mx, name))
        held = rounded.view(mx.uint16) if name == "bfloat16" else rounded
        extent = add(np.array(held), name)
        return Matrix(rows, columns, FLOAT_BITS[name], 0, "float", extent)
    form = QuantizedForm(bits, group, name, "float16" if name == "symmetric" else "float32")
    found = quantize_rows(values, form).rows
    parts = [add(found.words, "uint32"), add(found.scales, form.scale_dtype)]
    if found.biases is not None:
        parts.append(add(found.biases, form.scale_dtype))
    return Matrix(rows, columns, bits, group, name, *parts)
