"""The sliced kernel: an MLP forward and backward, a slice s of its width after another.

    g = x G_s^T    u = x U_s^T    a = f(g) * u    y = sum over s of a D_s^T

G_s and U_s are rows of gate and up, or of both halves of one matrix, D_s the same columns of down.
Without a gate there are no u and U_s. Backward, a slice's values are
recomputed, and its tiles of gate and up serve both directions:

    da = dy D_s    (dg, du) from da    dx = sum over s of dg G_s + du U_s

Adapters are sliced likewise: B of gate and up by columns, A of down by rows, so the gradients of
those are complete with each slice. Those of the other factors follow from sums of rank r. The
equations of biases, adapters and dropout are those of `runtime.operations.linear_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from runtime.arrays.arrays import Arrays
from runtime.arrays.dropout import DropoutMask
from runtime.arrays.matrices import Matrices
from runtime.arrays.products import LowRank
from runtime.arrays.stored import Matrix
from runtime.arrays.tile_products import Input, ReadyTile, RowSum
from runtime.arrays.values import Gradients, Lora, Loras, Values, accumulate
from runtime.operations.gated_kernel import Curve, curve_of, gated, gated_vjp
from runtime.operations.kernel import Kernel, Run, Tools
from runtime.operations.linear import Product
from runtime.operations.linear_kernel import LoraProducts
from runtime.operations.sliced_mlp import MOST_TOKENS, SlicedMlp, token_parts
from runtime.operations.values import gradient_of

PRODUCTS, GRADIENTS = ("gate", "up"), ("gate's gradient", "up's gradient")  # memory of a slice


@dataclass
class _IntoAdapter:
    """An adapter of gate or up, or of both in one matrix, for one input x (T, C)."""

    lora: Lora
    mask: DropoutMask | None
    through_a: mx.array  # s drop(x) A (T, r)
    through_b: mx.array  # sum over slices of s dg B_s^T (T, r)
    d_b: mx.array | None = None  # (r, W), or (r, 2 W)

    def backward(self, dg: mx.array, columns: slice, arrays: Arrays) -> None:
        """Take in the gradient dg (T, w) of a slice's values, which are those columns of B."""
        if self.d_b is None:
            self.d_b = mx.zeros(self.lora.b.shape)
        through_b = (dg @ self.lora.b[:, columns].T) * self.lora.scale
        self.through_b = arrays.sum(self.through_b, through_b)
        arrays.settle(self.through_b, self.d_b)
        arrays.put(self.d_b, (slice(None), columns), self.through_a.T @ dg)


@dataclass
class _Into:
    """The product of one input with gate or up, which begins at row `first` of its matrix."""

    given: Input
    bias: mx.array | None
    adapter: _IntoAdapter | None
    first: int

    def forward(
        self, tile: ReadyTile, columns: slice, arrays: Arrays, to: mx.array | None
    ) -> mx.array:
        """The values (T, w) of a slice, without the activation, perhaps in the memory of `to`."""
        columns = _from(self.first, columns)
        added = None
        if self.adapter is not None:
            added = LowRank(self.adapter.through_a, self.adapter.lora.b, columns=columns)
        y = tile.transposed_product(self.given, added=added, to=to)
        if self.bias is not None:
            y = arrays.sum(y, self.bias[columns])
        arrays.settle(y)
        return y


@dataclass
class _DownAdapter:
    """The adapter of down, for one input, of which a slice (T, w) is there at a time."""

    lora: Lora
    through_a: mx.array  # sum over slices of drop(a) A_s (T, r)

    def add(self, a: mx.array, columns: slice, arrays: Arrays) -> mx.array:
        """Add drop(a) A_s; returns drop(a)."""
        mask = self.mask(a.shape[0], columns)
        a = a if mask is None else mask(a)
        self.through_a = mx.addmm(self.through_a, a, self.lora.a[columns])
        arrays.settle(self.through_a, a)
        return a

    def mask(self, tokens: int, columns: slice) -> DropoutMask | None:
        """Which of a slice's values are dropped."""
        dropout, width = self.lora.dropout, columns.stop - columns.start
        return None if dropout is None else dropout.mask(tokens, width, columns.start)


class SlicedMlpKernel(Kernel):
    """The `SlicedMlp` operation."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation, mlp = run.operation(SlicedMlp), _Mlp(run, self.tools)
        (source,), (result,) = operation.inputs, operation.outputs
        xs = [values[source].squeeze(0) for values in lanes]
        if run.tokens <= MOST_TOKENS:
            for values, y in zip(lanes, self._forward(mlp, xs, loras), strict=True):
                values[result] = y[None]
            return
        ys = [mx.zeros((run.tokens, mlp.down.rows)) for _ in lanes]
        self.tools.arrays.settle(ys)
        for part in token_parts(run.tokens):
            after = [_after(lora, part.start) for lora in loras]
            parts = self._forward(mlp, [x[part] for x in xs], after)
            for y in ys:
                self.tools.arrays.put(y, part, parts.pop(0))
        for values in lanes:
            values[result] = ys.pop(0)[None]

    def _forward(self, mlp: _Mlp, xs: Sequence[mx.array], loras: Sequence[Loras]) -> list[mx.array]:
        """y (T, D) of every x (T, C), each with its adapters."""
        arrays, matrices = self.tools.arrays, self.tools.matrices
        tokens = xs[0].shape[0]
        intos = [mlp.into(x, lora) for x, lora in zip(xs, loras, strict=True)]
        downs = [mlp.down_adapter(tokens, lora) for lora in loras]
        ys = [mx.zeros((tokens, mlp.down.rows)) for _ in xs]
        observed = [mlp.observed(tokens, lora) for lora in loras]
        arrays.settle(ys, observed)
        for columns in mlp.slices(backward=False):
            products: list[list[mx.array]] = [[] for _ in xs]
            for at in range(len(mlp.parts)):
                tile = mlp.tile(at, columns)
                for lane, (into, made) in enumerate(zip(intos, products, strict=True)):
                    to = mlp.reused(PRODUCTS[at], tokens, columns, lane)
                    made.append(into[at].forward(tile, columns, arrays, to))
                del tile
            activated = [mlp.activated(products.pop(0)) for _ in xs]
            tile = matrices.tile(mlp.down, columns.start, columns.stop)
            for lane, adapter in enumerate(downs):
                a = activated.pop(0)
                given = matrices.input(a)
                ys.append(tile.transposed_product(given, ys.pop(0)))
                arrays.settle(ys[-1])
                if adapter is not None:
                    adapter.add(a, columns, arrays)
                if (whole := observed[lane]) is not None:
                    arrays.put(whole, (slice(None), columns), a)
                del a, given
            del tile
        intos.clear()
        mlp.memory.clear()
        return [
            mlp.finished(ys.pop(0), lora, adapter, seen)
            for lora, adapter, seen in zip(loras, downs, observed, strict=True)
        ]

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation, mlp = run.operation(SlicedMlp), _Mlp(run, self.tools)
        (source,), (result,) = operation.inputs, operation.outputs
        x, dy = values[source].squeeze(0), values.pop(gradient_of(result)).squeeze(0)
        if run.tokens <= MOST_TOKENS:
            dx = self._backward(mlp, x, dy, loras, gradients)
            return {} if dx is None else {source: dx[None]}
        whole = mx.zeros(x.shape) if run.instruction.wanted else None
        self.tools.arrays.settle([] if whole is None else whole)
        for part in token_parts(run.tokens):
            after = _after(loras, part.start)
            dx = self._backward(mlp, x[part], dy[part], after, gradients)
            if whole is not None and dx is not None:
                self.tools.arrays.put(whole, part, dx)
            del dx
        return {} if whole is None else {source: whole[None]}

    def _backward(
        self, mlp: _Mlp, x: mx.array, dy: mx.array, loras: Loras, gradients: Gradients
    ) -> mx.array | None:
        """dx (T, C) of x (T, C) and dy (T, D), if it is wanted; adds to the gradients."""
        wanted, arrays, matrices = bool(mlp.run.instruction.wanted), mlp.tools.arrays, mlp.matrices
        into, down = mlp.into(x, loras), _DownBackward.of(mlp, dy, loras)
        dx = RowSum(arrays)
        for columns in mlp.slices(backward=True):
            tiles = [mlp.tile(at, columns) for at in range(len(mlp.parts))]
            products = [
                each.forward(tile, columns, arrays, mlp.reused(name, len(x), columns))
                for each, tile, name in zip(into, tiles, PRODUCTS, strict=False)
            ]
            to = mlp.reused("activation", len(x), columns)
            if down.adapter is not None:
                down.add(mlp.gated([*products], to), columns)
            d_products = mlp.gated_vjp(products, down.input_gradient(columns, to), columns)
            for each in into:
                d_product, tile = d_products.pop(0), tiles.pop(0)
                if each.adapter is not None:
                    each.adapter.backward(d_product, _from(each.first, columns), arrays)
                if wanted:
                    dx.add(matrices.input(d_product), tile)
                del d_product, tile
            del to
        mlp.memory.clear()
        down.finish(gradients)
        del dy, down
        mlp.finish_adapters(x, into, gradients)
        return mlp.finished_input(into, dx.result()) if wanted else None


@dataclass
class _Mlp:
    """One block's MLP: its matrices, and the parts of both directions."""

    run: Run
    tools: Tools
    linear: LoraProducts = field(init=False)
    parts: list[tuple[Product, Matrix, int]] = field(init=False)
    curve: Curve = field(init=False)
    down: Matrix = field(init=False)
    memory: dict[tuple[str, int], mx.array] = field(default_factory=dict)
    """Of a slice's values, by their name and lane, which those of the next slice take."""

    def __post_init__(self) -> None:
        stored, block = self.tools.stored, self.run.block
        self.linear = LoraProducts(self.tools.matrices)
        self.parts = self.operation.parts(block.tensor, stored)
        self.curve = curve_of(
            self.operation.gated, lambda name: self.tools.argument(block, name, {}, {})
        )
        self.down = stored[block.tensor(self.down_product.name)]

    @property
    def operation(self) -> SlicedMlp:
        return self.run.operation(SlicedMlp)

    @property
    def down_product(self) -> Product:
        (product,) = self.operation.down.linears
        return product

    @property
    def in_place(self) -> bool:
        """Whether compiled code computes the activation, and can in the memory of the gate."""
        return self.operation.gated.in_place(self.tools.execution)

    @property
    def matrices(self) -> Matrices:
        return self.tools.matrices

    def slices(self, backward: bool) -> Iterator[slice]:
        """The columns of its width that are taken at once."""
        whole = self.down.columns
        step = self.operation.width(self.run.block.tensor, self.tools.execution, backward)
        for start in range(0, whole, step):
            yield slice(start, min(whole, start + step))

    def tile(self, at: int, columns: slice) -> ReadyTile:
        """A slice of gate or up, by their place in `parts`."""
        _, matrix, first = self.parts[at]
        rows = _from(first, columns)
        return self.matrices.tile(matrix, rows.start, rows.stop)

    def into(self, x: mx.array, loras: Loras) -> list[_Into]:
        """The products of x (T, C) with gate and up, of which nothing is computed yet."""
        given, linears = self.tools.matrices.input(x), self.operation.into.linears
        of_product = {
            product: (self._bias(product, loras), self._into_adapter(x, loras.get(product.name)))
            for product in linears
        }
        return [_Into(given, *of_product[product], first) for product, _, first in self.parts]

    def _into_adapter(self, x: mx.array, lora: Lora | None) -> _IntoAdapter | None:
        if lora is None:
            return None
        if lora.observer is not None:
            lora.observer(x)
        mask = self.linear.mask(x, lora)
        through_a = self.linear.through_a(self.linear.dropped(x, mask), lora)
        through_b = mx.zeros(through_a.shape)
        self.tools.arrays.settle(through_a, through_b)
        return _IntoAdapter(lora, mask, through_a, through_b)

    def down_adapter(self, tokens: int, loras: Loras) -> _DownAdapter | None:
        """The adapter of down, which has seen no slice yet."""
        lora = loras.get(self.down_product.name)
        if lora is None:
            return None
        adapter = _DownAdapter(lora, mx.zeros((tokens, lora.a.shape[1])))
        self.tools.arrays.settle(adapter.through_a)
        return adapter

    def observed(self, tokens: int, loras: Loras) -> mx.array | None:
        """Memory for all of down's input (T, W), if it is observed."""
        lora = loras.get(self.down_product.name)
        watched = lora is not None and lora.observer is not None
        return mx.zeros((tokens, self.down.columns)) if watched else None

    def reused(self, name: str, tokens: int, columns: slice, lane: int = 0) -> mx.array | None:
        """Memory for a slice's values of that name (T, w): that of the slice before, if it fits.

        Compiled code fills it. Elsewhere products and activations make arrays of their own.
        """
        matrices = [self.down, *(matrix for _, matrix, _ in self.parts)]
        if not self.in_place or any(matrix.is_float for matrix in matrices):
            return None
        shape, key = (tokens, columns.stop - columns.start), (name, lane)
        if key not in self.memory or self.memory[key].shape != shape:
            self.memory.pop(key, None)
            made = self.memory[key] = mx.zeros(shape)
            mx.eval(made)
        return self.memory[key]

    def activated(self, products: list[mx.array]) -> mx.array:
        """a (T, w) of a slice's gate and up, which are consumed: where it can, in place of gate."""
        return self.gated(products, products[0] if self.in_place else None)

    def gated(self, products: list[mx.array], to: mx.array | None = None) -> mx.array:
        """a (T, w) of a slice's gate and up, which are consumed."""
        parts = [*products]
        products.clear()
        return gated(self.curve, *parts, team=self.matrices.team, to=to)

    def gated_vjp(self, products: list[mx.array], da: mx.array, columns: slice) -> list[mx.array]:
        """The gradients (T, w) of a slice's gate and up, which are consumed."""
        names = GRADIENTS[: len(products)]
        to = [self.reused(name, da.shape[0], columns) for name in names]
        parts = [*products, da]
        products.clear()
        memory = [each for each in to if each is not None] or None
        return gated_vjp(self.curve, *parts, team=self.matrices.team, to=memory)

    def finished(
        self,
        y: mx.array,
        loras: Loras,
        adapter: _DownAdapter | None,
        observed: mx.array | None,
    ) -> mx.array:
        """y (T, D) with bias and adapter."""
        bias = self._bias(self.down_product, loras)
        if bias is not None:
            y = self.tools.arrays.sum(y, bias)
        if adapter is not None:
            if adapter.lora.observer is not None and observed is not None:
                adapter.lora.observer(observed)
            through_a = adapter.through_a * adapter.lora.scale
            y = mx.addmm(y, through_a, adapter.lora.b)
        self.tools.arrays.settle(y)
        return y

    def finish_adapters(self, x: mx.array, into: Sequence[_Into], gradients: Gradients) -> None:
        """Add the gradients of the adapters of gate and up."""
        for (product, *_), each in zip(self.parts, into, strict=True):
            adapter = each.adapter  # of both halves of a matrix there is one
            if adapter is None or adapter.d_b is None:
                continue
            given = self.linear.dropped(x, adapter.mask)
            pair = self.linear.backward_a(given, adapter.through_b), adapter.d_b
            self.tools.arrays.settle(pair)
            adapter.d_b = None
            accumulate(gradients, {product.name: pair}, self.tools.arrays)

    def finished_input(self, into: Sequence[_Into], dx: mx.array) -> mx.array:
        """dx (T, C) with the parts of the adapters of gate and up."""
        for each in into:
            if (adapter := each.adapter) is not None and not each.first:
                self.tools.arrays.settle(dx)
                lora, through_b = adapter.lora, adapter.through_b
                added = self.linear.lora_input(lora, through_b, adapter.mask)
                dx = dx if added is None else added.onto(dx)
                dx = self.linear.add_dropped_input(dx, lora, through_b, adapter.mask)
        self.tools.arrays.settle(dx)
        return dx

    def _bias(self, product: Product, loras: Loras) -> mx.array | None:
        name = self.run.block.tensor(product.name)
        return self.tools.vector(f"{name}.bias", loras) if product.bias else None


@dataclass
class _DownBackward:
    """The backward of down from the gradient dy (T, D) of its output."""

    mlp: _Mlp
    dy: Input
    adapter: _DownAdapter | None
    through_b: mx.array | None = None  # s dy B^T (T, r)
    d_a: mx.array | None = None  # (W, r)

    @classmethod
    def of(cls, mlp: _Mlp, dy: mx.array, loras: Loras) -> _DownBackward:
        adapter, given = mlp.down_adapter(dy.shape[0], loras), mlp.matrices.input(dy)
        if adapter is None:
            return cls(mlp, given, None)
        through_b = mlp.linear.through_b(dy, adapter.lora)
        d_a = mx.zeros(adapter.lora.a.shape)
        mlp.tools.arrays.settle(through_b, d_a)
        return cls(mlp, given, adapter, through_b, d_a)

    def add(self, a: mx.array, columns: slice) -> None:
        """Take in a slice's values a (T, w)."""
        assert self.adapter is not None and self.through_b is not None and self.d_a is not None
        arrays = self.mlp.tools.arrays
        dropped = self.adapter.add(a, columns, arrays)
        arrays.put(self.d_a, columns, (self.through_b.T @ dropped).T)

    def input_gradient(self, columns: slice, to: mx.array | None) -> mx.array:
        """The gradient (T, w) of a slice's values, evaluated, perhaps in the memory of `to`."""
        linear, mask, added, rows = self.mlp.linear, None, None, None
        if self.adapter is not None and self.through_b is not None:
            tokens, lora = self.dy.x.shape[0], self.adapter.lora
            mask = self.adapter.mask(tokens, columns)
            if mask is None:
                added = LowRank(self.through_b, lora.a, transposed=True, columns=columns)
            else:
                rows = Lora(lora.a[columns], lora.b, lora.scale)
        da = linear.input_part(self.dy, self.mlp.down, columns, added, to)
        if rows is not None and self.through_b is not None:
            da = linear.add_dropped_input(da, rows, self.through_b, mask)
        self.mlp.tools.arrays.settle(da)
        return da

    def finish(self, gradients: Gradients) -> None:
        """Add the adapter's gradients."""
        if self.adapter is None or self.d_a is None:
            return
        through_a = self.adapter.through_a * self.adapter.lora.scale
        d_b = through_a.T @ self.dy.x
        pair, self.d_a = (self.d_a, d_b), None
        self.mlp.tools.arrays.settle(pair)
        accumulate(gradients, {self.mlp.down_product.name: pair}, self.mlp.tools.arrays)


def _from(first: int, columns: slice) -> slice:
    return slice(first + columns.start, first + columns.stop)


def _after(loras: Loras, tokens: int) -> Loras:
    """The adapters for what follows so many tokens."""
    return {name: lora.after(tokens) for name, lora in loras.items()}
