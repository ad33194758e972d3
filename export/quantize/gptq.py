"""GPTQ: integers chosen column by column, each taking up the errors of those before it.

Frantar et al. 2022 (arXiv 2210.17323), with scales and biases fixed beforehand by the search on the
original weights ("static groups"), and the columns in the order of descending diagonal of the
Hessian ("activation order").

The paper propagates errors by the Cholesky factor of the inverse Hessian. The same integers follow
from the factor of the Hessian itself, which needs no inverse. With the columns numbered in
ascending order of the diagonal, H = L L^T, and D = W - Q,

    tr(D H D^T) = sum over k of |D L_k|^2,    D L_k = L_kk (D_k + sum over m > k of D_m L_mk / L_kk)

so from the last column to the first, Q_k is the value nearest to W_k + sum of D_m L_mk / L_kk.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from export.quantize.gram import Gram
from export.quantize.nearest import CHUNK_VALUES, ErrorSums, Quantized, fit_rows, together
from export.quantize.scales import Floats, inverse_of
from export.stored import F32, QuantizedForm, QuantizedRows, words_of
from runtime.core.errors import DataError

DAMPING_LIMIT = 1.0  # of the mean diagonal
BLOCK = 128  # columns whose sums over the columns before them are one matrix product
LEAF = 16  # columns of a block, likewise
TILE_ROWS = 1024  # that a thread quantizes at a time


@dataclass(frozen=True)
class Chunk:
    """The factor of one block on the Hessian's diagonal.

    order: (n,) the matrix's columns in ascending order of the diagonal.  lower: (n, n), below the
    diagonal the columns of L over their diagonal elements, elsewhere the Hessian in that order.
    """

    order: npt.NDArray[np.intp]
    lower: F32


@dataclass(frozen=True)
class Factor:
    """A factored Hessian, for all rows of all matrices that share the input.

    damping: the share of the mean diagonal that was added to the diagonal, the largest of any
    chunk; above the one asked for where float32 needed more.
    """

    columns: int
    chunks: tuple[Chunk, ...]
    damping: float


def prepare_bytes(block: int) -> int:
    """The bytes that `prepare` takes beside the Gram matrix, whose memory becomes the factor's."""
    return 4 * 3 * min(BLOCK, block) * block + 64 * block + 16 * BLOCK**2 * 4


def prepare(gram: Gram, damping: float = 0.01) -> Factor:
    """Factor the Hessian `gram`, whose blocks are taken over and overwritten.

    damping: the share of the mean diagonal to add to the diagonal; 0.1 suits inputs of fewer than
    8 rows of text. It is raised tenfold while float32 finds a block not positive definite, up to
    DAMPING_LIMIT. A column that no token used gets its nearest integers.

    Raises:
        DataError: even the largest damping does not help.
    """
    mean = gram.mean_diagonal or 1.0
    used = damping
    chunks = []
    for (start, _), block in zip(gram.extents, gram.take(), strict=True):
        order = _sort(block)
        used = max(used, _factor_damped(block, mean, damping))
        chunks.append(Chunk(order + start, block))
    return Factor(gram.columns, tuple(chunks), used)


def gptq_bytes(rows: int, columns: int, block: int, form: QuantizedForm, threads: int = 2) -> int:
    """The bytes that `gptq` takes on top of its rows and the factor, with its result."""
    tile, width = min(rows, TILE_ROWS), min(columns, block)
    numbers = 2 if form.layout == "affine" else 1
    groups = numbers * rows * (columns // form.group_size)
    working = tile * (9 * width + 8 * BLOCK + 16 * columns // form.group_size * numbers)
    searched = 16 * min(CHUNK_VALUES, rows * columns)
    words = rows * columns * form.bits // 8
    return (
        rows * columns
        + 2 * groups * np.dtype(form.scale_dtype).itemsize
        + max(threads * max(working, searched), 3 * words)
        + (1 << 18)
    )


def _tiles(n: int) -> list[slice]:
    return [slice(start, min(n, start + BLOCK)) for start in range(0, n, BLOCK)]


def _mirror(a: F32) -> None:
    """Copy the upper triangle of a (n, n) to the lower one."""
    for tile in _tiles(len(a)):
        a[tile.stop :, tile] = a[tile, tile.stop :].T
        upper = np.triu(a[tile, tile], 1)
        a[tile, tile] = upper + upper.T + np.diag(np.diagonal(a[tile, tile]))


def _sort(a: F32) -> npt.NDArray[np.intp]:
    """Fill a (n, n) from its upper triangle and sort it by its diagonal; returns the order."""
    _mirror(a)
    order = np.argsort(np.diagonal(a), kind="stable")
    for tile in _tiles(len(a)):
        a[tile] = a[tile][:, order]
    for tile in _tiles(len(a)):
        a[:, tile] = a[:, tile][order]
    return order


def _factor_damped(a: F32, mean: float, damping: float) -> float:
    """Factor a (n, n) in place; returns the damping."""
    diagonal = np.diagonal(a).copy()
    every = np.diag_indices(len(a))
    while True:
        a[every] = diagonal + np.float32(damping * mean)
        if _cholesky(a):
            break
        if damping >= DAMPING_LIMIT:
            raise DataError(
                "the inputs of a matrix give no Hessian that is positive definite, even with "
                f"{damping:g} of its mean diagonal added (the diagonal goes from "
                f"{diagonal.min():.3g} to {diagonal.max():.3g}): they hold values that are not "
                "finite or too large for float32; calibrate with other data, or without"
            )
        damping = min(DAMPING_LIMIT, 10 * max(damping, 1e-5))
        _mirror(a)
    root = np.diagonal(a).astype(np.float64)
    for tile in _tiles(len(a)):
        a[tile.stop :, tile] /= root[tile].astype(np.float32)
        within = np.tril(a[tile, tile], -1) / root[tile]
        a[tile, tile] = within + np.triu(a[tile, tile], 1) + np.diag(diagonal[tile])
    return damping


def _cholesky(a: F32) -> bool:
    """Write L of a = L L^T over the lower triangle of a (n, n); the rest of `a` is only read.

    Returns whether `a` is positive definite; if not, the lower triangle is spoilt.
    """
    for tile in _tiles(len(a)):
        done, below = slice(0, tile.start), slice(tile.stop, None)
        square = a[tile, tile].astype(np.float64)
        square -= a[tile, done] @ a[tile, done].T
        try:
            lower = np.linalg.cholesky(square)
        except np.linalg.LinAlgError:
            return False
        if not np.isfinite(lower).all():
            return False
        a[below, tile] -= a[below, done] @ a[tile, done].T
        a[below, tile] = a[below, tile] @ np.linalg.inv(lower).T.astype(np.float32)
        a[tile, tile] = lower + np.triu(a[tile, tile], 1)
    return True


def gptq(w: F32, factor: Factor, form: QuantizedForm, threads: int = 2) -> Quantized:
    """Quantize rows (R, C) of finite values so that their products with the inputs change least.

    Rows are independent: a matrix may come in slices. Scales and biases are those of
    `quantize_rows`; where one is too large for its type, it is infinite.
    """
    rows, columns = w.shape
    if columns != factor.columns:
        raise ValueError(f"rows of {columns} columns, and a factor for {factor.columns}")
    scales, biases = fit_rows(w, form, threads)
    codes = np.empty(w.shape, np.uint8)

    def work(task: tuple[int, Chunk]) -> ErrorSums:
        start, chunk = task
        part = slice(start, start + TILE_ROWS)
        steps = _Steps(scales[part], None if biases is None else biases[part], form)
        d = np.ascontiguousarray(w[part].T[chunk.order])
        squares = _square_sum(d)
        with np.errstate(over="ignore", invalid="ignore"):  # seen as infinite scales
            codes[part, chunk.order] = _quantize(d, chunk, steps).T
            return squares, _square_sum(d), float(max(d.max(), -d.min()))

    with ThreadPoolExecutor(threads) as pool:
        sums = list(pool.map(work, product(range(0, rows, TILE_ROWS), factor.chunks)))
    return Quantized(QuantizedRows(words_of(codes, form.bits), scales, biases), *together(sums))


def _square_sum(d: F32) -> float:
    return float(np.einsum("nr,nr->n", d, d).sum(dtype=np.float64))


class _Steps:
    """The numbers that a row's groups can stand for, by group: (C / group_size, R) float32."""

    def __init__(self, scales: Floats, biases: Floats | None, form: QuantizedForm) -> None:
        self.group_size = form.group_size
        self.zero = np.float32(2 ** (form.bits - 1) if biases is None else 0)
        self.low = -self.zero
        self.high = np.float32(2**form.bits - 1) - self.zero
        # an infinite scale is refused elsewhere: it must only not spread to other columns
        self.scale = _finite(scales)
        self.bias = None if biases is None else _finite(biases)
        self.inverse = inverse_of(self.scale)


def _finite(a: Floats) -> F32:
    """The transpose of `a`, float32, with zeros in place of infinities and NaN."""
    return np.ascontiguousarray(np.where(np.isfinite(a), a, 0).astype(np.float32).T)


def _quantize(d: F32, chunk: Chunk, steps: _Steps) -> npt.NDArray[np.uint8]:
    """The integers (n, R) for a chunk's weights d (n, R), which become D = W - Q."""
    n, rows = d.shape
    lower = chunk.lower
    groups = chunk.order // steps.group_size
    codes = np.empty(d.shape, np.uint8)
    target, q = np.empty(rows, np.float32), np.empty(rows, np.float32)
    for stop in range(n, 0, -BLOCK):
        start = max(0, stop - BLOCK)
        carried = lower[stop:, start:stop].T @ d[stop:]  # (BLOCK, R)
        for end in range(stop, start, -LEAF):
            first = max(start, end - LEAF)
            leaf = carried[first - start : end - start]
            leaf += lower[end:stop, first:end].T @ d[end:stop]
            for k in range(end - 1, first - 1, -1):
                group = groups[k]
                np.add(d[k], leaf[k - first], out=target)
                if k + 1 < end:
                    target += lower[k + 1 : end, k] @ d[k + 1 : end]
                if steps.bias is not None:
                    target -= steps.bias[group]
                np.multiply(target, steps.inverse[group], out=q)
                np.rint(q, out=q)
                np.clip(q, steps.low, steps.high, out=q)
                np.add(q, steps.zero, out=codes[k], casting="unsafe")
                np.multiply(q, steps.scale[group], out=q)
                target -= q
                d[k] -= q
                if steps.bias is not None:
                    d[k] -= steps.bias[group]
    return codes
