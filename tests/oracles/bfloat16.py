"""Products of factors rounded to bfloat16, summed in float32: the slow reference."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.dequantize import dense
from runtime.arrays.products import Products
from runtime.arrays.stored import Matrix
from runtime.arrays.tile_products import ReadyTile
from runtime.arrays.weight_source import Tile

ROUNDING = 2.0**-8  # the most by which rounding changes a value, relatively


def nearest(values: Any) -> npt.NDArray[np.float32]:
    """The nearest values of bfloat16, ties to even."""
    bits = np.array(values, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


class RoundedProducts(Products):
    """Products of float32 whose factors are rounded first, on any processor."""

    def whole_tile(self, tile: Tile, matrix: Matrix, packed: bool, products: Products) -> ReadyTile:
        """In place of `ReadyTile.of`: a tile whose values have their shifts before rounding."""
        values = self.factor(dense(tile, matrix.bits, self.arrays))
        return ReadyTile(matrix, products, None, values, None)

    def factor(self, x: mx.array) -> mx.array:
        return mx.array(nearest(x))

    def rounded(self, x: mx.array, matrix: Matrix) -> mx.array:
        return self.factor(x)
