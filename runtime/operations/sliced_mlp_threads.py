"""A sliced MLP by threads, each with some of its slices.

The equations are those of `runtime.operations.sliced_mlp_kernel`. First each thread computes the
values of a slice of its own, then each adds products with all of them to its part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import lines, new_floats, quiet, view
from runtime.arrays.side_by_side import Floats, Part
from runtime.arrays.stored import DRAWN
from runtime.arrays.values import Lora
from runtime.machine.openblas import OpenBlas
from runtime.operations.gated_kernel import put_gated, put_gated_vjp


@dataclass(frozen=True)
class Besides:
    """What a matrix's products get besides, for one set of tokens."""

    bias: Floats | None
    lora: Lora | None
    through: Floats | None  # of gate and up s x A (T, r), of down s dy B^T

    @property
    def a(self) -> Floats:
        """A (C, r)."""
        assert self.lora is not None
        return lines(self.lora.a)

    @property
    def b(self) -> Floats:
        """B (r, R)."""
        assert self.lora is not None
        return lines(self.lora.b)


@dataclass(frozen=True)
class BackwardSums:
    """What a backward sums over slices, without what adapters add to dx.

    Of down's adapter a A (T, r) and dA (W, r); of gate's and up's dg B^T (T, r) and dB (r, W).
    """

    dx: mx.array | None
    through_a: mx.array | None
    d_a: mx.array | None
    through_bs: list[mx.array | None]
    d_bs: list[mx.array | None]


@dataclass(frozen=True)
class _Round:
    """A slice of each thread, and its values (T, w)."""

    slices: list[slice]
    values: list[list[Floats]]


@dataclass(frozen=True)
class ThreadedMlp:
    """The matrices of an MLP, of whose width threads take slices of at most `width` columns."""

    gate: Part
    up: Part
    down: Part
    activation: str
    width: int

    def forward(
        self,
        xs: Sequence[Floats],
        into: Sequence[Sequence[Besides]],
        downs: Sequence[Lora | None],
        observed: Sequence[Floats | None],
    ) -> tuple[list[mx.array], list[mx.array | None]]:
        """a D^T (T, D) and a A (T, r) of down's adapter, for every x (T, C).

        `into` has gate's and up's besides for each x. `observed` (T, W) takes down's inputs.
        """
        tokens, ranks = len(xs[0]), [None if lora is None else lora.a.shape[1] for lora in downs]
        results = [new_floats(tokens, self.down.matrix.rows) for _ in xs]
        ys = [*map(view, results)]
        sums = [None if rank is None else _Sums.of((tokens, rank), self._threads) for rank in ranks]

        @quiet
        def compute(round: _Round, number: int) -> None:
            columns = round.slices[number]
            if columns.start == columns.stop:
                return
            gates, ups = round.values[number][: len(xs)], round.values[number][len(xs) :]
            self._products(number, xs, into, columns, (gates, ups))
            for lane, (g, u) in enumerate(zip(gates, ups, strict=True)):
                put_gated(self.activation, g.reshape(-1), u.reshape(-1), g.reshape(-1))
                lora, total, seen = downs[lane], sums[lane], observed[lane]
                if lora is not None and total is not None:
                    self._blas.multiply(g, view(lora.a)[columns], total[number], add=True)
                if seen is not None:
                    seen[:, columns] = g

        def add(round: _Round, number: int) -> None:
            rows = self.down.rows_of(number)
            for columns, values in zip(round.slices, round.values, strict=True):
                self.down.put_by_columns(number, values[: len(xs)], ys, rows, columns, add=True)

        for round in self._rounds(2 * len(xs), tokens):
            self.down.threads.run(partial(compute, round))
            self.down.threads.run(partial(add, round))
        return results, [_joined(each) for each in sums]

    def backward(
        self, x: Floats, dy: Floats, into: Sequence[Besides], down: Besides, wanted: bool
    ) -> BackwardSums:
        """What is summed over slices of x (T, C) and dy (T, D); dx only if it is wanted."""
        tokens, columns_in = x.shape
        dx = new_floats(tokens, columns_in) if wanted else None
        shapes = [None if one.lora is None else (tokens, one.lora.a.shape[1]) for one in into]
        through_bs = [None if shape is None else _Sums.of(shape, self._threads) for shape in shapes]
        d_bs = [None if one.lora is None else new_floats(*one.lora.b.shape) for one in into]
        through_a, d_a = None, None
        if down.lora is not None:
            through_a = _Sums.of((tokens, down.lora.a.shape[1]), self._threads)
            d_a = new_floats(*down.lora.a.shape)

        @quiet
        def compute(round: _Round, number: int) -> None:
            columns, (g, u, a, da, du) = round.slices[number], round.values[number]
            if columns.start == columns.stop:
                return
            self._products(number, [x], [into], columns, ([g], [u]))
            if through_a is not None and d_a is not None and down.through is not None:
                put_gated(self.activation, g.reshape(-1), u.reshape(-1), a.reshape(-1))
                self._blas.multiply(a, down.a[columns], through_a[number], add=True)
                self._blas.multiply(a.T, down.through, view(d_a)[columns])
            self.down.put_by_rows(number, dy, da, self.down.rows, columns)
            if down.through is not None:
                self._blas.multiply(down.through, down.a[columns].T, da, add=True)
            put_gated_vjp(self.activation, *(each.reshape(-1) for each in (g, u, da, a, du)))
            for one, d, through_b, d_b in zip(into, (a, du), through_bs, d_bs, strict=True):
                if one.through is not None and through_b is not None and d_b is not None:
                    self._blas.multiply(d, one.b[:, columns].T, through_b[number], add=True)
                    self._blas.multiply(one.through.T, d, view(d_b)[:, columns])

        def add(round: _Round, number: int) -> None:
            assert dx is not None
            for columns, (_, _, dg, _, du) in zip(round.slices, round.values, strict=True):
                for part, d in ((self.gate, dg), (self.up, du)):
                    of_thread = part.columns_of(number)
                    part.put_by_rows(number, d, view(dx), columns, of_thread, add=True)

        for round in self._rounds(5, tokens):
            self.down.threads.run(partial(compute, round))
            if dx is not None:
                self.down.threads.run(partial(add, round))
        return BackwardSums(dx, _joined(through_a), d_a, [_joined(one) for one in through_bs], d_bs)

    def _products(
        self,
        number: int,
        xs: Sequence[Floats],
        into: Sequence[Sequence[Besides]],
        columns: slice,
        results: tuple[list[Floats], list[Floats]],
    ) -> None:
        """The values (T, w) of a slice of gate and of up, of every x, without the activation."""
        for at, (part, ys) in enumerate(zip((self.gate, self.up), results, strict=True)):
            part.put_by_columns(number, xs, ys, columns, part.columns)
            for y, besides in zip(ys, into, strict=True):
                one = besides[at]
                if one.bias is not None:
                    np.add(y, one.bias[columns], out=y)
                if one.through is not None:
                    self._blas.multiply(one.through, one.b[:, columns], y, add=True)

    def _rounds(self, count: int, tokens: int) -> Iterator[_Round]:
        """Slices of all threads, in whole groups of down's columns, with memory for their values.

        It is one piece for all rounds: arrays of many sizes would leave holes.
        """
        unit = math.lcm(DRAWN, self.down.matrix.group_size or 1)
        parts = [
            self.down.threads.part(number, self.down.matrix.columns, unit)
            for number in range(self._threads)
        ]
        memory = np.empty((self._threads, count, tokens * self.width), np.float32)
        for before in range(0, max(part.stop - part.start for part in parts), self.width):
            slices = []
            for part in parts:
                start = min(part.stop, part.start + before)
                slices.append(slice(start, min(part.stop, start + self.width)))
            shaped = [_shaped(own, tokens, cut) for own, cut in zip(memory, slices, strict=True)]
            yield _Round(slices, shaped)

    @property
    def _threads(self) -> int:
        return self.down.threads.count

    @property
    def _blas(self) -> OpenBlas:
        return self.down.blas


def _shaped(memory: Floats, tokens: int, columns: slice) -> list[Floats]:
    """The memory of each value as (T, w)."""
    width = columns.stop - columns.start
    return [values[: tokens * width].reshape(tokens, width) for values in memory]


@dataclass(frozen=True)
class _Sums:
    """A sum of each thread, of which the first is an array of MLX."""

    first: mx.array
    parts: list[Floats]

    @classmethod
    def of(cls, shape: tuple[int, ...], threads: int) -> _Sums:
        first = new_floats(*shape)
        others = [np.zeros(shape, np.float32) for _ in range(1, threads)]
        return cls(first, [view(first), *others])

    def __getitem__(self, number: int) -> Floats:
        return self.parts[number]

    @quiet
    def joined(self) -> mx.array:
        """The sum of all; those of threads are freed."""
        whole = self.parts.pop(0)
        while self.parts:
            np.add(whole, self.parts.pop(0), out=whole)
        return self.first


def _joined(sums: _Sums | None) -> mx.array | None:
    return None if sums is None else sums.joined()


def viewed(x: mx.array | None) -> Floats | None:
    """The memory of x, evaluated, if there is one."""
    return None if x is None else lines(x)
