"""The linear kernel: y = x W^T + b + s (x A) B, with W packed, and its hand-derived backward.

    dA = s x^T (dy B^T)    dB = s (x A)^T dy    dx = dy W + s (dy B^T) A^T

x A is recomputed in the backward pass (MeSP, arXiv 2602.13069). Several inputs (*lanes*) can meet
each tile of W while it is unpacked; a lane's result does not depend on its companions. The
reference is `harness.oracles.reference.linear`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ondevice.bundle.manifest import Matrix
from runtime.engine.kernels.in_place import contiguous, put
from runtime.engine.kernels.product import Input, OpenTile, RowSum
from runtime.engine.profile import Profile
from runtime.lowering.token_tiles import WHOLE, rows_at_once
from runtime.storage.weights import Weights

Place = tuple[int, int]  # where a matrix begins in weights.bin, and a row of it


@dataclass(frozen=True)
class Lora:
    """An adapter of one matrix: a (C, r), b (r, R), and the factor s = alpha / r."""

    a: mx.array
    b: mx.array
    scale: float


@dataclass(frozen=True)
class LinearKernel:
    """How products with packed matrices run; `tile_values` bounds the values unpacked at once.

    With `hold`, what was unpacked stays until `release` (a whole block at once, as MeBP's paper
    does it). The matrices that begin at the offsets `resident` stay unpacked in `opened_before`.
    """

    weights: Weights
    arithmetic: str
    tile_values: int
    hold: bool = False
    profile: Profile = field(default_factory=Profile)
    resident: frozenset[int] = frozenset()
    opened_before: dict[Place, OpenTile] = field(default_factory=dict)
    _held: dict[Place, OpenTile] = field(default_factory=dict)

    def opened(self, matrix: Matrix, start: int, stop: int) -> OpenTile:
        """Rows start:stop of a matrix, read and unpacked."""
        key = (matrix.packed.offset, start)
        for kept in (self._held, self.opened_before):
            if key in kept:
                return kept[key]
        with self.profile.span("read"):
            tile = self.weights.tile(matrix, start, stop)
            self.profile.settle(tile.words, tile.scales)
        with self.profile.span("unpack"):
            opened = OpenTile.of(tile, matrix, self.arithmetic)
            self.profile.settle(opened.columns)
        if matrix.packed.offset in self.resident:
            self.opened_before[key] = opened
        elif self.hold:
            self._held[key] = opened
        return opened

    def release(self) -> None:
        """Let go of what `hold` has kept."""
        self._held.clear()

    def _ranges(self, matrix: Matrix) -> Iterator[tuple[int, int]]:
        values = WHOLE if self.arithmetic == "packed" else self.tile_values
        step = rows_at_once(matrix.rows, matrix.columns, values)
        for start in range(0, matrix.rows, step):
            yield start, min(matrix.rows, start + step)

    def forward(
        self, x: mx.array, matrix: Matrix, bias: mx.array | None, lora: Lora | None
    ) -> mx.array:
        """y (T, R) of x (T, C)."""
        return self.forward_lanes([x], matrix, bias, [lora])[0]

    def forward_lanes(
        self,
        xs: Sequence[mx.array],
        matrix: Matrix,
        bias: mx.array | None,
        loras: Sequence[Lora | None],
    ) -> list[mx.array]:
        """y (T, R) of every x (T, C), each with its own adapter, in one pass over the matrix."""
        outputs = self._products(xs, matrix)
        results = []
        for x, lora in zip(xs, loras, strict=True):
            y = outputs.pop(0)
            if bias is not None:
                y = y + bias
            if lora is not None:
                y = mx.addmm(y, (x @ lora.a) * lora.scale, lora.b)
            mx.eval(y)
            results.append(y)
        return results

    def _products(self, xs: Sequence[mx.array], matrix: Matrix) -> list[mx.array]:
        """x W^T of every x. Tiles write into outputs that are there before them.

        Were products of tiles kept to be joined, they would fill the holes that the tiles leave in
        the heap, and every tile would need a new place.
        """
        inputs = [Input.of(x, matrix, self.arithmetic) for x in xs]
        if len(list(self._ranges(matrix))) == 1:
            opened = self.opened(matrix, 0, matrix.rows)
            whole = []
            for given in inputs:
                whole.append(opened.transposed_product(given))
                mx.eval(whole[-1])
            return whole
        outputs = [mx.zeros((x.shape[0], matrix.rows)) for x in xs]
        mx.eval(outputs)
        for start, stop in self._ranges(matrix):
            opened = self.opened(matrix, start, stop)
            for lane, given in enumerate(inputs):
                part = opened.transposed_product(given)
                put(outputs[lane], (slice(None), slice(start, stop)), part)
                del part
            del opened
        return outputs

    def through_b(self, dy: mx.array, lora: Lora) -> mx.array:
        """s (dy B^T) (T, r) of dy (T, R), which dA and dx share."""
        return (dy @ lora.b.T) * lora.scale

    def backward_input(self, dy: mx.array, matrix: Matrix) -> mx.array:
        """dy W (T, C) of dy (T, R): dx without the part of an adapter."""
        total = RowSum()
        for start, stop in self._ranges(matrix):
            # contiguous: else every product with a column would make its own copy
            whole = stop - start == matrix.rows
            part = dy if whole else contiguous(dy, (slice(None), slice(start, stop)))
            total.add(part, self.opened(matrix, start, stop))
            del part
        return total.result(matrix.group_size)

    def add_lora_input(self, dx: mx.array, lora: Lora, dy_b: mx.array) -> mx.array:
        """dx with the part of an adapter, of its `through_b`."""
        return mx.addmm(dx, dy_b, lora.a.T)

    def backward_lora(
        self, x: mx.array, dy: mx.array, lora: Lora, dy_b: mx.array
    ) -> tuple[mx.array, mx.array]:
        """dA (C, r) and dB (r, R) of x (T, C), dy (T, R) and its `through_b`."""
        # not x^T (T, r): threads of a BLAS would pack all of x between them
        da = mx.contiguous((dy_b.T @ x).T)
        db = ((x @ lora.a) * lora.scale).T @ dy
        return da, db
