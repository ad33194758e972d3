"""A manifest whose matrices are float32: the unquantized model, without a weights file of its own.

Lowering, planning and running take it like any other. Its weights come from
`runtime.storage.row_weights`, which reads the rows of a checkpoint.
"""

from __future__ import annotations

import math

import msgspec

from ondevice.bundle.manifest import Manifest
from ondevice.operations.tensors import ALIGNMENT, FLOAT_BITS, ITEM_BYTES, Extent, Matrix

FLOAT = "float32"


def float_manifest(manifest: Manifest) -> Manifest:
    """The manifest with every matrix as float32 and without its quantization error.

    Tensors have new offsets, at which they would lie one after another in a weights file, vectors
    first. Since there is no such file, its SHA-256 is empty.
    """
    end = 0

    def placed(shape: tuple[int, ...]) -> Extent:
        nonlocal end
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * ITEM_BYTES[FLOAT]
        return Extent(start, end - start, FLOAT, shape)

    vectors = {name: placed(extent.shape) for name, extent in manifest.vectors.items()}
    matrices = {
        name: Matrix(m.rows, m.columns, FLOAT_BITS[FLOAT], 0, "float", placed((m.rows, m.columns)))
        for name, m in manifest.matrices.items()
    }
    return msgspec.structs.replace(
        manifest, matrices=matrices, vectors=vectors, weights_nbytes=end, weights_sha256=""
    )
