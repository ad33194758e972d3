"""The code of a product with a quantized tile.

`runtime.arrays.compiled_products` says how it goes, and runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from runtime.arrays.stored_codes import TYPES, unpacked, widened
from runtime.machine.llvm_code import (
    Aligned,
    Code,
    Integer,
    Pointer,
    Truth,
    Value,
    Variable,
    dot_of_pairs,
    fields,
    fma,
    minimum,
    pairs_of,
    where,
)

F32 = 4

DEPTH = 128  # of the inner dimension at a time: a multiple of every group
JOB = (
    *("next", "words", "scales", "biases", "x", "y", "tokens", "x_step", "y_step", "columns"),
    *("depth", "groups", "adds", "rank", "u", "b", "b_row", "b_column", "block"),
)
ADDRESSES = (*JOB[1:6], "u", "b")
"""What a product takes, each 8 bytes: addresses, and counts of values or groups.

`next` counts the parts of the result that threads have taken. `x_step`, `y_step` and `groups` are
from one row to the next; `columns` are those of y, `depth` those of x. A product u b of some rank
is added, with u (tokens, rank); `b_row` and `b_column` are from one of its rows or columns to the
next. A part has as many tokens as a `block`.
"""


@dataclass(frozen=True)
class Registers:
    """The sums that a processor holds in registers: some tokens, for some vectors of columns."""

    lanes: int  # float32 values of a vector
    vectors: int
    tokens: int
    strips: int = 1  # of so many columns, that a thread takes at once
    steps: int = 1  # of the inner dimension, in one pass of the loop

    @property
    def width(self) -> int:
        """Columns of the result that are computed at once."""
        return self.lanes * self.vectors

    @property
    def part_width(self) -> int:
        """Columns of a part of the result."""
        return self.width * self.strips


WIDE, NARROW = Registers(16, 4, 6), Registers(8, 2, 6, 4, 4)  # AVX-512, AVX2


class Kind(NamedTuple):
    """Quantized weights, and the registers of a processor."""

    bits: int
    size: int  # of a group
    scales: str
    affine: bool
    registers: Registers
    inner: int  # values along the inner dimension in 32 bits: 2 of bfloat16

    @property
    def middle(self) -> int:
        """The code of 0."""
        return 1 << (self.bits - 1)


class Weights(NamedTuple):
    """Where they lie in the map, with `groups` from one row to the next."""

    words: Pointer
    scales: Pointer
    biases: Pointer
    groups: Integer
    columns: Integer  # of the result


class Block(NamedTuple):
    """Rows of x and y of some tokens, and how many columns of y are left."""

    x: Pointer
    x_step: Integer
    y: Pointer
    y_step: Integer
    left: Integer


def text_of(
    by_rows: bool,
    bits: int,
    size: int,
    scales: str,
    affine: bool,
    registers: Registers,
    inner: int = 1,
) -> str:
    """The product x W^T, or `by_rows` x W, for groups of `size` columns and scales of a type.

    With an `inner` of 2 both factors are bfloat16, and x has its values so.
    """
    of = Kind(bits, size, scales, affine, registers, inner)
    return Code(registers.lanes).text(_product, by_rows=by_rows, of=of)


def _product(code: Code, job: Pointer, panel: Aligned, *, by_rows: bool, of: Kind) -> None:
    """Do parts, each of some columns for a block of tokens, until none is left."""
    registers, a = of.registers, fields(job, JOB, ADDRESSES)
    dequantize = _by_rows if by_rows else _by_columns
    weights = Weights(a.words, a.scales, a.biases, a.groups, a.columns)
    blocks, adding = (a.tokens + (a.block - 1)) // a.block, a.adds > 0
    with code.endless() as leave:
        number = job.view("i64").atomic("add", 1)
        first = number // blocks * registers.part_width
        leave(first >= a.columns)
        here = minimum(a.columns - first, registers.part_width)
        token = number % blocks * a.block
        count = minimum(a.tokens - token, a.block)
        x, y, u = a.x + token * a.x_step, a.y + token * a.y_step + first, a.u + token * a.rank
        with code.loop(0, a.depth, DEPTH) as k:
            deep = minimum(a.depth - k, DEPTH)
            with code.loop(0, here, registers.width) as c:
                code.call(dequantize, weights, first + c, k, deep, panel + c * DEPTH, of=of)
            given = Block(x + k // of.inner, a.x_step, y, a.y_step, here)
            pairs = (deep + (of.inner - 1)) // of.inner
            code.call(_tokens, count, given, panel, pairs, (k > 0) | adding, of=of)
        with code.when(a.rank > 0):
            with code.loop(0, a.rank) as d:
                b_row = a.b + d * a.b_row
                with code.loop(0, here) as e:
                    strip, within = e // registers.width, e % registers.width
                    place = (strip * DEPTH + d) * registers.width + within
                    panel[place] = b_row[(first + e) * a.b_column]
            given = Block(u, a.rank, y, a.y_step, here)
            code.call(_tokens, count, given, panel, a.rank, 1, of=of._replace(inner=1))


def _tokens(
    code: Code,
    tokens: Integer,
    block: Block,
    panel: Aligned,
    deep: Integer,
    sums: Truth,
    *,
    of: Kind,
) -> None:
    """y = x P, or += x P if it `sums`: strips of some tokens' columns, while the next x come."""
    x, x_step, y, y_step, here = block
    most, t = of.registers.tokens, Variable(code.value(0))
    x_most = x_step * most
    with code.endless([t]) as leave:
        rest = tokens - t.now
        leave(rest.equals(0))
        x_t, y_t = x + t.now * x_step, y + t.now * y_step
        soon = [x_t + x_most + x_step * i for i in range(most)]
        with code.loop(0, deep, 16) as line:
            for row in soon:
                (row + line).prefetch()
        with code.loop(0, here, of.registers.width) as c:
            given = Block(x_t, x_step, y_t + c, y_step, here - c), panel + c * DEPTH, deep, sums
            for count in code.cases(rest, range(1, most + 1)):
                code.call(_few, *given, of=of, count=count)
        t.now = t.now + minimum(rest, most)


def _few(
    code: Code, block: Block, panel: Aligned, deep: Integer, sums: Truth, *, of: Kind, count: int
) -> None:
    """y = x P, or += x P, for so many tokens, with every sum in a register.

    With AVX2 masked stores are slow, so whole vectors have others.
    """
    registers, (x, x_step, y, y_step, left) = of.registers, block
    firsts = [v * code.lanes for v in range(registers.vectors)]
    x_rows, y_rows = zip(*[(x + x_step * i, y + y_step * i) for i in range(count)], strict=True)
    masks, full = [left.mask(first) for first in firsts], left >= registers.width
    loaded = [mask & sums.splat() for mask in masks]
    multiply, number = (fma, "float") if of.inner == 1 else (dot_of_pairs, "i32")
    kept, x_taken = panel.view(number), [row.view(number) for row in x_rows]
    z = [Variable(code.zeros()) for _ in y_rows for _ in firsts]
    places = [row + first for row in y_rows for first in firsts]
    done = code.value(0)
    for steps in dict.fromkeys((registers.steps, 1)):
        stop = deep - (deep - done) % steps
        with code.when(done < stop, z), code.loop(done, stop, steps, z) as d:
            p, x_at = kept + d * registers.width, [row + d for row in x_taken]
            inner = range(steps)
            w = [[(p + (u * registers.width + first)).load() for u in inner] for first in firsts]
            x_all = [[row[u].splat() for u in inner] for row in x_at]
            for at, total in enumerate(z):
                i, v = divmod(at, len(firsts))
                for u in inner:
                    total.now = multiply(x_all[i][u], w[v][u], total.now)
        done = stop
    for whole in code.either(full, z):
        with nullcontext() if not whole else code.when(sums, z):
            for at, total in enumerate(z):
                total.now = total.now + places[at].load(None if whole else loaded[at % len(firsts)])
        for at, total in enumerate(z):
            places[at].store(total.now, None if whole else masks[at % len(firsts)])


def _by_rows(
    code: Code, w: Weights, first: Integer, k: Integer, deep: Integer, panel: Aligned, *, of: Kind
) -> None:
    """For x W: rows k of W, of which columns `first` and on are a row of P."""
    size, width = of.size, of.registers.width
    words, piece, groups = w.words.view("i8"), min(size, width), w.groups
    scales, biases = w.scales.view(TYPES[of.scales]), w.biases.view(TYPES[of.scales])
    here, block_octets = minimum(w.columns - first, width), groups * (DEPTH * size * of.bits // 8)

    def values_of(row: Integer, column: Integer) -> Value:
        at = (k + row) * groups + column // size
        octets = words + (at * size + column % size) // (8 // of.bits)
        (octets + block_octets).prefetch()
        codes, scale = unpacked(octets, piece, of.bits), widened(scales[at])
        values = (codes - of.middle).astype("float") * scale.splat(piece)
        if of.affine:
            values = values + (widened(biases[at]) + scale * of.middle).splat(piece)
        return values

    with code.loop(0, deep, of.inner) as r:
        to = panel + r // of.inner * width
        with code.loop(0, here, piece) as c:
            values = values_of(r, first + c)
            if of.inner == 1:
                (to + c).store(values)
            else:
                after = values_of(minimum(r + 1, deep - 1), first + c)
                (to + c).view("i32").store(pairs_of(values, after))


def _by_columns(
    code: Code, w: Weights, first: Integer, k: Integer, deep: Integer, panel: Aligned, *, of: Kind
) -> None:
    """For x W^T: columns k of W, of which rows `first` and on are a row of P.

    A vector has one word of each of some rows, so its codes are already in the places of P. Rows
    past the last are the last one.
    """
    lanes, size, width, bits = code.lanes, of.size, of.registers.width, of.bits
    group_octets, word_codes = size * bits // 8, 32 // bits
    scales, biases = w.scales.view(TYPES[of.scales]), w.biases.view(TYPES[of.scales])
    groups_all, last = w.groups.astype("i32").splat(), (w.columns - 1).astype("i32").splat()
    stop = (k + deep) // size
    start = k // size
    with code.loop(0, of.registers.vectors) as v:
        rows = (first + v * lanes).astype("i32").splat() + code.arange()
        before = where(rows > last, last, rows) * groups_all
        p = panel + v * lanes
        with code.loop(start, stop) as g:
            at = before + g.astype("i32").splat()
            groups_at = [at.lane(lane).astype("i64") for lane in range(lanes)]
            for group in groups_at:
                (w.words.view("i8") + group * group_octets + DEPTH * bits // 8).prefetch()
            scale = widened(_collected(scales, groups_at))
            shift = None
            if of.affine:
                shift = widened(_collected(biases, groups_at)) + scale * of.middle
            words_at, column = at * (group_octets // 4), g * size - k
            with code.loop(0, group_octets // 4) as q:
                packed = w.words.view("i32").gather(words_at + q.astype("i32").splat())
                to, values = (column + q * word_codes) // of.inner, list[Value]()
                for j in range(word_codes):
                    codes = (packed >> j * bits) & ((1 << bits) - 1)
                    numbers = (codes - of.middle).astype("float") * scale
                    values.append(numbers if shift is None else numbers + shift)
                for j in range(0, word_codes, of.inner):
                    at_j = p + (to + j // of.inner) * width
                    if of.inner == 1:
                        at_j.store(values[j])
                    else:
                        at_j.view("i32").store(pairs_of(*values[j : j + 2]))


def _collected(numbers: Pointer, places: Sequence[Value]) -> Value:
    """A vector of numbers that lie apart."""
    gathered = Value(numbers.code, "zeroinitializer", numbers.to, len(places))
    for lane, at in enumerate(places):
        gathered = gathered.put(lane, numbers[at])
    return gathered


def rounding_text(lanes: int) -> str:
    """Rows of float32 to bfloat16, each to the nearest, and 0 after a last odd one."""
    return Code(lanes).text(_round)


def _round(code: Code, job: Pointer, own: Pointer) -> None:
    """Take rows until none is left."""
    a = fields(job, ("next", "few", "rows", "columns", "x", "y", "x_step"), ("x", "y"))
    pairs = (a.columns + 1) // 2
    with code.endless() as leave:
        first = job.view("i64").atomic("add", 1) * a.few
        leave(first >= a.rows)
        with code.loop(first, minimum(first + a.few, a.rows)) as row:
            x, y = a.x + row * a.x_step, (a.y + row * pairs).view("i16")
            with code.loop(0, a.columns, code.lanes) as at:
                left = a.columns - at
                rounded = (x + at).load(left.mask()).astype("bfloat").view("i16")
                (y + at).store(rounded, (pairs * 2 - at).mask())
