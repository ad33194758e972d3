"""The linear kernel: y = x W^T (+ b) + s (x A) B with W frozen, and its hand-derived backward.

    dA = s x^T (dy B^T)    dB = s (x A)^T dy    dx = dy W + s (dy B^T) A^T

With dropout, drop(x) takes the place of x in the products with A, and dx = dy W + drop(s (dy B^T)
A^T) with the same mask, which is drawn again (`runtime.arrays.dropout`).
x A is recomputed in the backward pass (MeSP, arXiv 2602.13069). Several inputs (batch lanes) can be
multiplied by each tile of W while it is dequantized; the result of a lane does not depend on the
others. The reference is `tests.oracles.whole_model.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from runtime.arrays.dropout import DropoutMask
from runtime.arrays.matrices import Matrices
from runtime.arrays.products import LowRank
from runtime.arrays.stored import Matrix
from runtime.arrays.tile_products import Input, RowSum
from runtime.arrays.values import Gradients, Lora, Loras, Move, Values, accumulate, move_of
from runtime.operations.kernel import Kernel, Run
from runtime.operations.linear import Linear


@dataclass(frozen=True)
class LoraProducts:
    """Products of arrays (T, C) with one frozen matrix and its adapter, and their gradients."""

    matrices: Matrices

    def forward(
        self, x: mx.array, matrix: Matrix, bias: mx.array | None, lora: Lora | None
    ) -> mx.array:
        """y (T, R) of x (T, C)."""
        return self.forward_lanes([x], matrix, [bias], [lora])[0]

    def forward_lanes(
        self,
        xs: Sequence[mx.array],
        matrix: Matrix,
        biases: Sequence[mx.array | None],
        loras: Sequence[Lora | None],
        moves: Sequence[Move | None] = (),
    ) -> list[mx.array]:
        """y (T, R) of every x (T, C), each with its own adapter, in one pass over the matrix.

        `moves` say how each moves the matrix itself; without them none does.
        """
        added = [self._added(x, lora) for x, lora in zip(xs, loras, strict=True)]
        outputs = self._products(xs, matrix, moves or [None] * len(xs), added)
        added.clear()
        results = []
        for bias in biases:
            y = outputs.pop(0)
            if bias is not None:
                y = self.matrices.arrays.sum(y, bias)
            self.matrices.arrays.settle(y)
            results.append(y)
        return results

    def _added(self, x: mx.array, lora: Lora | None) -> LowRank | None:
        """s (x A) B, which an adapter adds to the products of x."""
        if lora is None:
            return None
        if lora.observer is not None:
            lora.observer(x.astype(mx.float32))
        through_a = self.through_a(self.dropped(x, self.mask(x, lora)), lora)
        self.matrices.arrays.settle(through_a)
        return LowRank(through_a, lora.b)

    def _products(
        self,
        xs: Sequence[mx.array],
        matrix: Matrix,
        moves: Sequence[Move | None],
        added: Sequence[LowRank | None],
    ) -> list[mx.array]:
        """x W^T of every x, and what is added; tiles write into outputs allocated before them.

        If the products of tiles were kept and joined later, they would fill the holes that freed
        tiles leave in the heap, and every tile would need new memory.
        """
        matrices, arrays = self.matrices, self.matrices.arrays
        if matrices.by_columns(matrix):
            return self._sums(xs, matrix, added)
        inputs = [matrices.input(x) for x in xs]
        if len(list(matrices.taken(matrix))) == 1:
            whole: dict[int, mx.array] = {}
            for tile, lanes in matrices.as_seen(matrix, 0, matrix.rows, moves):
                for lane in lanes:
                    whole[lane] = tile.transposed_product(inputs[lane], added=added[lane])
                    arrays.settle(whole[lane])
                del tile
            return [whole.pop(lane) for lane in range(len(xs))]
        outputs = [mx.zeros((x.shape[0], matrix.rows)) for x in xs]
        arrays.settle(outputs)
        for start, stop in matrices.taken(matrix):
            for tile, lanes in matrices.as_seen(matrix, start, stop, moves):
                for lane in lanes:
                    tile.put_product(inputs[lane], outputs[lane], slice(start, stop))
                del tile
        return self._with(outputs, added)

    def _with(self, ys: list[mx.array], added: Sequence[LowRank | None]) -> list[mx.array]:
        """Every y, which is consumed, with what is added to it."""
        for each in added:
            ys.append(_plus(ys.pop(0), each))
            self.matrices.arrays.settle(ys[-1])
        return ys

    def _sums(
        self, xs: Sequence[mx.array], matrix: Matrix, added: Sequence[LowRank | None]
    ) -> list[mx.array]:
        """x W^T of every x, where tiles are columns: the sum of the products with all of them."""
        matrices, arrays = self.matrices, self.matrices.arrays
        outputs = [mx.zeros((x.shape[0], matrix.rows)) for x in xs]
        arrays.settle(outputs)
        for start, stop in matrices.taken(matrix):
            tile = matrices.tile(matrix, start, stop)
            columns = None if stop - start == matrix.columns else slice(start, stop)
            for x in xs:
                given = matrices.input(x, columns)
                outputs.append(tile.transposed_product(given, outputs.pop(0)))
                del given
                arrays.settle(outputs[-1])
            del tile
        return self._with(outputs, added)

    def through_a(self, x: mx.array, lora: Lora) -> mx.array:
        """s (x A) (T, r) for x (T, C)."""
        return (x @ lora.a.astype(x.dtype)) * lora.scale

    def through_b(self, dy: mx.array, lora: Lora) -> mx.array:
        """s (dy B^T) (T, r) for dy (T, R), which dA and dx both use."""
        return (dy @ lora.b.T) * lora.scale

    def backward_input(
        self, dy: mx.array, matrix: Matrix, added: LowRank | None = None
    ) -> mx.array:
        """dy W (T, C) for dy (T, R), with `added`, the adapter's part."""
        matrices = self.matrices
        if matrices.by_columns(matrix):
            return self._input_columns(dy, matrix, added)
        total = RowSum(matrices.arrays)
        at_once = len(list(matrices.taken(matrix))) == 1
        for start, stop in matrices.taken(matrix):
            rows = None if at_once else slice(start, stop)
            tile = matrices.tile(matrix, start, stop)
            total.add(matrices.input(dy, rows), tile, added=added if at_once else None)
            del tile
        return total.result() if at_once else _plus(total.result(), added)

    def _input_columns(self, dy: mx.array, matrix: Matrix, added: LowRank | None) -> mx.array:
        """dy W (T, C), where tiles are columns of W, with `added`."""
        matrices, arrays, given = self.matrices, self.matrices.arrays, self.matrices.input(dy)
        parts = [*matrices.taken(matrix)]
        if len(parts) == 1:
            return self.input_part(given, matrix, slice(*parts[0]), added)
        dx = mx.zeros((dy.shape[0], matrix.columns))
        arrays.settle(dx)
        for start, stop in parts:
            part = self.input_part(given, matrix, slice(start, stop))
            arrays.put(dx, (slice(None), slice(start, stop)), part)
            del part
        return _plus(dx, added)

    def input_part(
        self,
        dy: Input,
        matrix: Matrix,
        columns: slice,
        added: LowRank | None = None,
        to: mx.array | None = None,
    ) -> mx.array:
        """Columns of dy W (T, C), where these are a tile of W, with `added`, perhaps in `to`."""
        total = RowSum(self.matrices.arrays)
        tile = self.matrices.tile(matrix, columns.start, columns.stop)
        total.add(dy, tile, added=added, to=to)
        return total.result()

    def lora_input(
        self, lora: Lora, dy_b: mx.array, mask: DropoutMask | None = None
    ) -> LowRank | None:
        """The adapter's part of dx, which follows from `through_b`; None if values are dropped."""
        return LowRank(dy_b, lora.a, transposed=True) if mask is None else None

    def add_dropped_input(
        self, dx: mx.array, lora: Lora, dy_b: mx.array, mask: DropoutMask | None
    ) -> mx.array:
        """dx with the adapter's part added, where values are dropped."""
        return dx if mask is None else dx + mask(dy_b @ lora.a.T)

    def backward_lora(
        self, x: mx.array, dy: mx.array, lora: Lora, dy_b: mx.array, mask: DropoutMask | None = None
    ) -> tuple[mx.array, mx.array]:
        """dA (C, r) and dB (r, R) for x (T, C), dy (T, R) and its `through_b`."""
        x = self.dropped(x, mask)
        db = self.through_a(x, lora).T @ dy
        return self.backward_a(x, dy_b), db

    def backward_a(self, x: mx.array, dy_b: mx.array) -> mx.array:
        """dA (C, r) for an input (T, C) of which values have been dropped, and its `through_b`."""
        # not x^T (T, r): threads of a BLAS would pack all of x between them
        return mx.contiguous((dy_b.T @ x).T)

    def mask(self, x: mx.array, lora: Lora) -> DropoutMask | None:
        """Which values of the input x (T, C) are dropped, evaluated; None without dropout."""
        mask = lora.mask(x)
        if mask is not None:
            self.matrices.arrays.settle(mask.remaining)
        return mask

    def dropped(self, x: mx.array, mask: DropoutMask | None) -> mx.array:
        """drop(x), evaluated; x itself without a mask."""
        if mask is None:
            return x
        remaining = mask(x)
        self.matrices.arrays.settle(remaining)
        return remaining


def _plus(y: mx.array, added: LowRank | None) -> mx.array:
    return y if added is None else added.onto(y)


class LinearKernel(Kernel):
    """The products of one value with the matrices of a `Linear` operation."""

    @property
    def products(self) -> LoraProducts:
        return LoraProducts(self.tools.matrices)

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Linear)
        xs = [values[operation.inputs[0]].squeeze(0) for values in lanes]  # a view; [0] copies
        for linear in operation.linears:
            if linear.output not in run.instruction.wanted:
                continue
            name = run.block.tensor(linear.name)
            biases = self._biases(f"{name}.bias", loras) if linear.bias else [None] * len(lanes)
            matrix = self.tools.stored[name]
            adapters = [lora.get(linear.name) for lora in loras]
            moves = [move_of(lora) for lora in loras]
            ys = self.products.forward_lanes(xs, matrix, biases, adapters, moves)
            for values, y in zip(lanes, ys, strict=True):
                values[linear.output] = y[None]
            del ys

    def _biases(self, name: str, loras: Sequence[Loras]) -> list[mx.array | None]:
        """A bias as each batch lane sees it; lanes that see the same share the array."""
        seen: dict[Move | None, mx.array] = {}
        for lora in loras:
            if (move := move_of(lora)) not in seen:
                seen[move] = self.tools.vector(name, lora)
        return [seen[move_of(lora)] for lora in loras]

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation, products = run.operation(Linear), self.products
        arrays = self.tools.arrays
        source = operation.inputs[0]
        x: mx.array | None = None  # in float32
        total: mx.array | None = None
        for linear in operation.linears:
            received = values.pop(f"~{linear.output}", None)
            if received is None:
                continue  # not adapted, and no adapter lies before it
            dy = received.squeeze(0)
            lora = loras.get(linear.name)
            mask = None
            if lora is not None:
                x = values[source].squeeze(0).astype(mx.float32) if x is None else x
                wide = dy.astype(mx.float32)
                dy_b = products.through_b(wide, lora)
                mask = products.mask(x, lora)
                pair = products.backward_lora(x, wide, lora, dy_b, mask)
                del wide
                arrays.settle(pair)
                accumulate(gradients, {linear.name: pair}, arrays)
                del pair
            if run.instruction.wanted:
                name = run.block.tensor(linear.name)
                added = None if lora is None else products.lora_input(lora, dy_b, mask)
                dx = products.backward_input(dy, self.tools.stored[name], added)
                if lora is not None:
                    dx = products.add_dropped_input(dx, lora, dy_b, mask)
                    del dy_b, added
                total = dx if total is None else arrays.sum(total, dx)
                arrays.settle(total)
                del dx
            del dy, received, mask
        return {} if total is None else {source: total[None]}
