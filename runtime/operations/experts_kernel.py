"""The experts kernel: gated MLPs over the tokens that chose them, forward and backward.

For an expert e, its tokens t, and a slice s of its width:

    g = x G_s^T    u = x U_s^T    a = f(g) * u    y_t += w_te (sum over s of a D_s^T)

with biases added to g, u and the sum. Backward the values of a slice are recomputed, and each tile
is read and dequantized once, where d is the bias of the sum:

    b = dy D_s    dw_te = dy . d + sum over s of a . b    (dg, du) from w_te b
    dx_t += dg G_s + du U_s

Experts run in the order of their numbers, and the results of a batch lane do not depend on the
others. The reference is `tests.oracles.experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.matrices import Matrices
from runtime.arrays.stored import Matrix
from runtime.arrays.tile_products import Input, ReadyTile, RowSum
from runtime.arrays.values import Gradients, Loras, Values
from runtime.core.errors import BundleError
from runtime.operations.experts import Experts
from runtime.operations.gated_kernel import gated_by, gated_vjp_by
from runtime.operations.kernel import Kernel, Run, Tools
from runtime.operations.values import gradient_of

Indices = npt.NDArray[np.int64]


class Part(NamedTuple):
    """Tokens of one expert that are taken at once, and which of each one's choices it is."""

    tokens: Indices  # (n,), ascending
    slots: Indices  # (n,)


@dataclass(frozen=True)
class Routes:
    """The tokens of each expert: places in (T, k), in the order of experts, then of tokens."""

    order: Indices  # (T k,)
    bounds: Indices  # (experts + 1,)
    slots: int
    at_once: int

    @classmethod
    def of(cls, chosen: mx.array, operation: Experts) -> Routes:
        """From the numbers (T, k) of the chosen experts.

        Raises:
            BundleError: a number is none of an expert, or a token chooses one twice.
        """
        (tokens, slots), experts = chosen.shape, operation.count
        values = np.asarray(chosen).reshape(-1)
        lowest, highest = float(values.min()), float(values.max())
        if not (lowest >= 0 and highest < experts):
            raise BundleError(
                f"a token is sent to expert {lowest:g} or {highest:g}, of {experts}: the bundle's "
                "graphs do not belong to its weights, export it again"
            )
        numbers = values.astype(np.int64)
        order = np.argsort(numbers, kind="stable")
        places = numbers[order] * tokens + order // slots
        if not (places[1:] > places[:-1]).all():
            raise BundleError("a token is sent to one expert twice: export the bundle again")
        bounds = np.searchsorted(numbers[order], np.arange(experts + 1))
        return cls(order, bounds, slots, operation.tokens_at_once(tokens, slots))

    def parts(self, expert: int) -> list[Part]:
        """An expert's tokens, as they are taken at once."""
        places = self.order[self.bounds[expert] : self.bounds[expert + 1]]
        return [
            Part(
                places[start : start + self.at_once] // self.slots,
                places[start:][: self.at_once] % self.slots,
            )
            for start in range(0, len(places), self.at_once)
        ]


class ExpertsKernel(Kernel):
    """The `Experts` operation."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation, arrays = run.operation(Experts), self.tools.arrays
        source, weighed, chosen = operation.inputs
        routes = [Routes.of(values[chosen].squeeze(0), operation) for values in lanes]
        xs = [values[source].squeeze(0) for values in lanes]
        weights = [np.asarray(values[weighed]).squeeze(0) for values in lanes]
        rows = int(run.program.values[operation.outputs[0]][-1])
        ys = [mx.zeros((run.tokens, rows)) for _ in lanes]
        mx.eval(ys)
        biases = self._biases(run)
        for number in range(operation.count):
            parts = [of_lane.parts(number) for of_lane in routes]
            for at in range(max(map(len, parts))):
                taken = [lane for lane, own in enumerate(parts) if at < len(own)]
                expert = _Expert.of(run, self.tools, number, biases)
                given = [
                    mx.take(xs[lane], mx.array(parts[lane][at].tokens), axis=0) for lane in taken
                ]
                made = expert.forward(given)
                given.clear()
                for lane in taken:
                    part = parts[lane][at]
                    y = made.pop(0) * mx.array(weights[lane][part.tokens, part.slots])[:, None]
                    arrays.settle(y)
                    arrays.add_rows(ys[lane], part.tokens, y)
                    del y
                mx.eval([ys[lane] for lane in taken])  # always: of many experts few fit at once
        for values in lanes:
            values[operation.outputs[0]] = ys.pop(0)[None]

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation, arrays = run.operation(Experts), self.tools.arrays
        source, weighed, chosen = operation.inputs
        x, weights = values[source].squeeze(0), np.asarray(values[weighed]).squeeze(0)
        dy = values.pop(gradient_of(operation.outputs[0])).squeeze(0)
        routes = Routes.of(values[chosen].squeeze(0), operation)
        dx = mx.zeros(x.shape) if source in run.instruction.wanted else None
        mx.eval(dx, dy)
        biases = self._biases(run)
        d_weights = np.zeros(weights.shape, np.float32)
        for number in range(operation.count):
            for part in routes.parts(number):
                expert = _Expert.of(run, self.tools, number, biases)
                tokens = mx.array(part.tokens)
                w = mx.array(weights[part.tokens, part.slots])
                pair = expert.backward(
                    mx.take(x, tokens, axis=0), w, mx.take(dy, tokens, axis=0), dx is not None
                )
                d_weights[part.tokens, part.slots] = np.asarray(pair[0])
                if dx is not None and pair[1] is not None:
                    arrays.settle(pair[1])
                    arrays.add_rows(dx, part.tokens, pair[1])
                    mx.eval(dx)
                del pair
        results = {weighed: mx.array(d_weights)[None]}
        if dx is not None:
            results[source] = dx[None]
        return {name: results[name] for name in run.instruction.wanted}

    def _biases(self, run: Run) -> list[mx.array]:
        """Those of gate (E, W), up (E, W) and down (E, D), or none."""
        names = run.operation(Experts).vectors(run.block.tensor)
        return [self.tools.vector(name, {}) for name in names]


@dataclass(frozen=True)
class _Expert:
    """One expert's matrices and biases, and both directions of its MLP for a few tokens."""

    tools: Tools
    activation: str
    gate: Matrix
    up: Matrix
    down: Matrix
    width: int
    biases: tuple[mx.array, ...]  # of gate, up and down, or none

    @classmethod
    def of(cls, run: Run, tools: Tools, number: int, biases: list[mx.array]) -> _Expert:
        operation, tensor = run.operation(Experts), run.block.tensor
        matrices = operation.of_one(tensor, tools.stored, number)
        width = operation.width(tensor, tools.execution)
        own = tuple(bias[number] for bias in biases)
        return cls(tools, operation.activation, *matrices, width, own)

    @property
    def matrices(self) -> Matrices:
        return self.tools.matrices

    @property
    def _device(self) -> str:
        return self.tools.execution.tables.device

    def _slices(self) -> Iterator[tuple[int, int]]:
        columns = self.down.columns
        for start in range(0, columns, self.width):
            yield start, min(columns, start + self.width)

    def _product(self, tile: ReadyTile, given: Input, at: int, columns: slice) -> mx.array:
        """The values (n, w) of a slice, of gate (0) or up (1), without the activation."""
        y = tile.transposed_product(given)
        if self.biases:
            y = self.tools.arrays.sum(y, self.biases[at][columns])
        self.tools.arrays.settle(y)
        return y

    def forward(self, xs: list[mx.array]) -> list[mx.array]:
        """y (n, D) of every x (n, C), not weighed; `xs` is emptied."""
        self.tools.arrays.settle(xs)
        inputs = [self.matrices.input(x) for x in xs]
        ys = [mx.zeros((x.shape[0], self.down.rows)) for x in xs]
        xs.clear()
        self.tools.arrays.settle(ys)
        for start, stop in self._slices():
            products: list[list[mx.array]] = [[] for _ in ys]
            for at, matrix in enumerate((self.gate, self.up)):
                tile = self.matrices.part(matrix, start, stop)
                for given, made in zip(inputs, products, strict=True):
                    made.append(self._product(tile, given, at, slice(start, stop)))
                del tile
            activated = [gated_by(self._device, self.activation, *products.pop(0)) for _ in inputs]
            tile = self.matrices.part(self.down, start, stop, by_columns=True)
            for _ in inputs:
                given_down = self.matrices.input(activated.pop(0))
                ys.append(tile.transposed_product(given_down, ys.pop(0)))
                self.tools.arrays.settle(ys[-1])
                del given_down
            del tile
        return [self.tools.arrays.sum(y, self.biases[2]) for y in ys] if self.biases else ys

    def backward(
        self, x: mx.array, w: mx.array, dy: mx.array, wanted: bool
    ) -> tuple[mx.array, mx.array | None]:
        """dw (n,) and, if it is wanted, dx (n, C) of x, w (n,) and dy (n, D)."""
        self.tools.arrays.settle(x, w, dy)
        dw = dy @ self.biases[2] if self.biases else mx.zeros(w.shape)
        dx = RowSum(self.tools.arrays)
        given, into = self.matrices.input(x), (self.gate, self.up)
        given_dy = self.matrices.input(dy)
        del x, dy
        for start, stop in self._slices():
            tiles = [self.matrices.part(matrix, start, stop) for matrix in into]
            columns = slice(start, stop)
            g, u = (self._product(tiles[at], given, at, columns) for at in range(2))
            total = RowSum(self.tools.arrays)
            total.add(given_dy, self.matrices.part(self.down, start, stop, by_columns=True))
            b = total.result()
            dw = dw + (gated_by(self._device, self.activation, g, u) * b).sum(axis=-1)
            self.tools.arrays.settle(dw)
            b = b * w[:, None]
            self.tools.arrays.settle(b)
            d_products = [*gated_vjp_by(self._device, self.activation, g, u, b)]
            del g, u, b
            while tiles:
                d_product, tile = d_products.pop(0), tiles.pop(0)
                if wanted:
                    dx.add(self.matrices.input(d_product), tile)
                del d_product, tile
        return dw, dx.result() if wanted else None
