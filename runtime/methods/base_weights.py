"""The model's own weights in PEFT's file of an adapter: whether they are those of the bundle.

PEFT saves the embedding and the head beside their adapters, and puts them into the model that it
loads: they are others where the vocabulary has grown. A bundle keeps its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.adapters import peft
from runtime.adapters.origins import elsewhere
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import FloatTile
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError
from runtime.methods.adapter_reader import MERGE, TYPES, AdapterFiles
from runtime.storage.weights import Weights

F32 = npt.NDArray[np.float32]
_MOST_VALUES = 1 << 20  # that are compared at a time
_ROUNDED = 0.02  # the largest difference of a row, to its length, of float16 and bfloat16


def check_base_weights(path: Path, bundle: Bundle) -> None:
    """Compare the weights that an adapter's file holds of the model itself with the bundle's.

    Raises:
        BundleError: they differ by more than rounding, or cannot be compared.
    """
    files = AdapterFiles.at(path, bundle.manifest)
    if not files.is_peft:
        return
    with files.opened(bundle.manifest.lora.rank) as tensors:
        if not (held := tensors.base):
            return
        if bundle.manifest.slice is not None:
            raise BundleError(
                f"{files.weights}: {held[0]} is a weight of the model itself, and {bundle.path} "
                "holds too few weights to compare it; if it is the model's own, delete it there"
            )
        matrices, weights = _matrices(bundle.manifest), Weights(bundle)
        for stored in held:
            where, theirs = f"{files.weights}: {stored}", tensors.file.get_slice(stored)
            dtype, matrix = theirs.get_dtype(), matrices.get(peft.base_module(stored))
            shape = None if matrix is None else (matrix.rows, matrix.columns)
            if matrix is None or tuple(theirs.get_shape()) != shape or dtype not in TYPES:
                raise BundleError(
                    f"{where} is {dtype} of shape {tuple(theirs.get_shape())}, a weight of "
                    f"the model itself, and the bundle has {shape or 'no such matrix'} there; "
                    f"{MERGE}"
                )
            if unlike := _unlike(theirs, weights, matrix):
                raise BundleError(
                    f"{where} is a weight of the model itself, and {len(unlike)} of its "
                    f"{matrix.rows} rows, such as {unlike[0]}, are not the bundle's: the adapter "
                    f"was trained on another model, or on one with other tokens; {MERGE}"
                )


def _matrices(manifest: Manifest) -> dict[str, Matrix]:
    """The matrices that are whole modules of transformers, by the names of these."""
    rows = {own: matrix.rows for own, matrix in manifest.matrices.items()}
    matrices = {
        module: manifest.matrices[own]
        for own, parts in elsewhere(manifest.family, manifest.provenance, rows, "--adapter").items()
        for module, part in parts
        if len(parts) == 1 and part.rows == part.height and not part.transposed
    }
    first, last = manifest.blocks[0], manifest.blocks[-1]
    if manifest.owner(last) == first:
        matrices[peft.HEAD] = manifest.matrices[first.tensor(manifest.adaptable(first)[0])]
    return matrices


def _unlike(stored: Any, weights: Weights, matrix: Matrix) -> list[int]:
    """The rows of a slice of safetensors that are not a matrix's."""
    near = _ROUNDED if matrix.is_float else min(_ROUNDED + 4 / (2**matrix.bits - 1), 0.9)
    step, unlike = max(1, _MOST_VALUES // matrix.columns), []
    for start in range(0, matrix.rows, step):
        stop = min(matrix.rows, start + step)
        theirs = stored[start:stop].astype(np.float32)
        apart = np.linalg.norm(theirs - _rows(weights, matrix, start, stop), axis=1)
        is_near = apart <= near * np.linalg.norm(theirs, axis=1)  # no number is near
        unlike += (start + np.flatnonzero(~is_near)).tolist()
    return unlike


def _rows(weights: Weights, matrix: Matrix, start: int, stop: int) -> F32:
    tile = weights.tile(matrix, start, stop)
    if isinstance(tile, FloatTile):
        return np.array(tile.values.astype(mx.float32))
    group, bits = matrix.columns // tile.scales.shape[1], matrix.bits
    biases = tile.biases(bits)
    return np.array(mx.dequantize(tile.words, tile.scales, biases, group_size=group, bits=bits))
