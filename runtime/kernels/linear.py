"""The linear kernel: y = x W^T + b + s (x A) B, with W packed, and its hand-derived backward.

    dA = s x^T (dy B^T)    dB = s (x A)^T dy    dx = dy W + s (dy B^T) A^T

x A is recomputed in the backward pass (MeSP, arXiv 2602.13069). Two arithmetics: *packed* calls
`quantized_matmul` on the words as they lie; *unpacked* unpacks `tile_rows` rows of W at a time to
float32 and multiplies. The reference for both is `harness.reference.linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from ondevice.manifest import Matrix
from runtime.kernels.unpack import group_sums, join, split, unpack
from runtime.weights import Tile, Weights


@dataclass(frozen=True)
class Lora:
    """An adapter of one matrix: a (C, r), b (r, R), and the factor s = alpha / r."""

    a: mx.array
    b: mx.array
    scale: float


@dataclass(frozen=True)
class LinearKernel:
    """How products with packed matrices run; `tile_values` bounds the values unpacked at once."""

    weights: Weights
    arithmetic: str
    tile_values: int

    def _tiles(self, matrix: Matrix) -> Iterator[tuple[int, int, Tile]]:
        whole = self.arithmetic == "packed"
        step = matrix.rows if whole else max(1, self.tile_values // matrix.columns)
        for start in range(0, matrix.rows, step):
            stop = min(matrix.rows, start + step)
            yield start, stop, self.weights.tile(matrix, start, stop)

    def forward(
        self, x: mx.array, matrix: Matrix, bias: mx.array | None, lora: Lora | None
    ) -> mx.array:
        """y (T, R) of x (T, C)."""
        parts = split(x, matrix.bits)
        outputs = []
        for _, _, tile in self._tiles(matrix):
            y = self.times_transposed(x, parts, tile, matrix)
            mx.eval(y)
            outputs.append(y)
        y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        outputs.clear()
        if bias is not None:
            y = y + bias
        if lora is not None:
            y = mx.addmm(y, (x @ lora.a) * lora.scale, lora.b)
        return y

    def backward_input(self, dy: mx.array, matrix: Matrix, lora: Lora | None) -> mx.array:
        """dx (T, C) of dy (T, R)."""
        total: mx.array | None = None
        halves: tuple[mx.array, ...] = ()
        for start, stop, tile in self._tiles(matrix):
            part = dy if stop - start == matrix.rows else dy[:, start:stop]
            if self.arithmetic == "packed":
                total = self.times(part, tile, matrix)
                continue
            columns = unpack(tile, matrix.bits)
            if halves:
                halves = tuple(mx.addmm(h, part, c) for h, c in zip(halves, columns, strict=True))
            else:
                halves = tuple(part @ c for c in columns)
            if tile.shift is not None:
                moved = part @ tile.shift
                total = moved if total is None else total + moved
                mx.eval(total)
            del columns
            mx.eval(halves)
        if halves:
            dx = join(halves)
            if total is not None:  # per group, the same for all of its columns
                dx = dx + mx.repeat(total, matrix.group_size, axis=1)
        else:
            assert total is not None
            dx = total
        if lora is not None:
            dx = mx.addmm(dx, (dy @ lora.b.T) * lora.scale, lora.a.T)
        return dx

    def backward_lora(self, x: mx.array, dy: mx.array, lora: Lora) -> tuple[mx.array, mx.array]:
        """dA (C, r) and dB (r, R) of x (T, C) and dy (T, R)."""
        da = x.T @ ((dy @ lora.b.T) * lora.scale)
        db = ((x @ lora.a) * lora.scale).T @ dy
        return da, db

    def times_transposed(
        self, x: mx.array, parts: tuple[mx.array, ...], tile: Tile, matrix: Matrix
    ) -> mx.array:
        """x W^T (T, R') for one tile; `parts` is x split for the matrix's bits."""
        if self.arithmetic == "packed":
            return mx.quantized_matmul(
                x,
                tile.words,
                tile.scales,
                tile.biases(matrix.bits),
                transpose=True,
                group_size=matrix.group_size,
                bits=matrix.bits,
            )
        columns = unpack(tile, matrix.bits)
        y = parts[0] @ columns[0].T
        for part, column in zip(parts[1:], columns[1:], strict=True):
            y = mx.addmm(y, part, column.T)
        if tile.shift is not None:
            y = mx.addmm(y, group_sums(x, tile.shift.shape[1]), tile.shift.T)
        return y

    def times(self, dy: mx.array, tile: Tile, matrix: Matrix) -> mx.array:
        """dy W (T, C) for one tile."""
        if self.arithmetic == "packed":
            return mx.quantized_matmul(
                dy,
                tile.words,
                tile.scales,
                tile.biases(matrix.bits),
                transpose=False,
                group_size=matrix.group_size,
                bits=matrix.bits,
            )
        dx = join(tuple(dy @ column for column in unpack(tile, matrix.bits)))
        if tile.shift is not None:
            dx = dx + mx.repeat(dy @ tile.shift, matrix.group_size, axis=1)
        return dx
