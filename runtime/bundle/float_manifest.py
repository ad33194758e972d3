"""A manifest whose matrices are float32: the unquantized model, without a weights file of its own.

Lowering, planning and running take it like any other. Its weights come from
`runtime.storage.row_weights`, which reads the rows of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from runtime.arrays.stored import ALIGNMENT, FLOAT_BITS, ITEM_BYTES, Extent, Matrix
from runtime.bundle.manifest import Manifest

FLOAT = "float32"


def float_tables(
    matrices: Mapping[str, tuple[int, int]], vectors: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Matrix], dict[str, Extent], int]:
    """Matrices and vectors as float32, given their shapes, and the bytes of all.

    They have the offsets at which they would lie one after another in a weights file, vectors
    first. There need be no such file.
    """
    end = 0

    def placed(shape: tuple[int, ...]) -> Extent:
        nonlocal end
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(shape) * ITEM_BYTES[FLOAT]
        return Extent(start, end - start, FLOAT, shape)

    small = {name: placed(shape) for name, shape in vectors.items()}
    large = {
        name: Matrix(*shape, FLOAT_BITS[FLOAT], 0, "float", placed(shape))
        for name, shape in matrices.items()
    }
    return large, small, end


def float_manifest(manifest: Manifest) -> Manifest:
    """The manifest with every matrix as float32, at other offsets, without a weights file."""
    matrices, vectors, nbytes = float_tables(
        {name: (matrix.rows, matrix.columns) for name, matrix in manifest.matrices.items()},
        {name: extent.shape for name, extent in manifest.vectors.items()},
    )
    return msgspec.structs.replace(
        manifest, matrices=matrices, vectors=vectors, weights_nbytes=nbytes, weights_sha256=""
    )
