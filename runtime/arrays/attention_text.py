"""The code of attention to tiles of keys.

`runtime.arrays.compiled_attention` says how it goes, and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from runtime.arrays.attention_scratch import BLOCK, TILE, scratch_sections
from runtime.arrays.product_text import Registers
from runtime.arrays.vector_text import exp, tanh
from runtime.machine.llvm_code import (
    Aligned,
    Code,
    Float,
    Integer,
    Pointer,
    Truth,
    Value,
    Variable,
    fields,
    fma,
    minimum,
    where,
)
from runtime.machine.threads import MOST_THREADS, SPINS, WAIT, WAKE

REGISTERS = {16: Registers(16, 4, 6), 8: Registers(8, 2, 6)}  # a tile has whole panels of them
UNSEEN = -1e30  # the largest score of a row that has seen no key
ARRAYS = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
"""Each has its address, and how many values are from one head, and from one row, to the next."""
OF_PREFIX = ("k", "v", "dk", "dv")
SECTIONS = tuple(scratch_sections(1, 1, backward=True) | scratch_sections(1, 1, backward=False))
FIELDS = (
    *("slots", "scratch", "scratch_size", "tokens", "groups", "repeats", "width", "value_width"),
    *("scale", "lows", "top", "total", "turns", "sleepers", "prefix"),
    *(name + part for name in ARRAYS for part in ("", "_head", "_row")),
    *(f"prefix_{name}{part}" for name in OF_PREFIX for part in ("", "_head")),
    *(f"at_{name}" for name in SECTIONS),
)
"""What attention takes, each 8 bytes: addresses, counts, and a scale in float32.

`slots` counts the threads that have taken a part of `scratch`. `lows` has for each token the first
that it sees. top and total are (H, T): of each row of scores the largest and the sum of e to what
they are below it; backward the log-sum-exp, and rowsum(dO * O). `turns` has for each tile of keys
of each group the block of queries that may add to its gradients, and `sleepers` counts the threads
that sleep until theirs comes. A prefix has rows of its own.
"""
ADDRESSES = {
    *("scratch", "lows", "top", "total", "turns", "sleepers", *ARRAYS),
    *(f"prefix_{name}" for name in OF_PREFIX),
}


def text_of(backward: bool, cap: float | None, lanes: int) -> str:
    """Attention's forward, or its backward, for scores with a cap or without."""
    return Code(lanes).text(attention, backward=backward, cap=cap)


class Rows(NamedTuple):
    """Some rows of an array: a tile's keys, or a head's block of queries."""

    at: Pointer
    step: Integer
    columns: Integer


class Factor(NamedTuple):
    """A factor of a product, with any steps from one of its values to the next."""

    at: Pointer
    down: Integer
    across: Integer


class Own(NamedTuple):
    """Whole rows of a thread's scratch."""

    at: Aligned
    columns: Integer


class Sight(NamedTuple):
    """Rows of scores, of queries from `first` on, with a tile of so many keys from `key` on."""

    rows: Integer
    lows: Pointer
    first: Integer
    key: Integer
    keys: Integer
    of_prefix: Truth
    scale: Float


def attention(code: Code, job: Pointer, own: Pointer, *, backward: bool, cap: float | None) -> None:
    """Do parts: a block of queries, of all heads that share keys, with each key that it sees.

    Parts with the most keys come first. Tiles of a prefix come before those of the sequence.
    """
    a = _given(code, job.view("ptr")[1].pointer())
    blocks, prefix_tiles = _count(a.tokens, BLOCK), _count(a.prefix, TILE)
    a.all_tiles = _count(a.tokens, TILE) + prefix_tiles
    parts = blocks * a.groups
    with code.endless() as leave:
        number = job.view("i64").atomic("add", 1)
        leave(number >= parts)
        a.group, a.block = number % a.groups, blocks - number // a.groups - 1
        a.first = a.block * BLOCK
        a.rows = minimum(a.tokens - a.first, BLOCK)
        a.part_lows = a.lows + a.first
        first_tile = a.part_lows[0].astype("i64") // TILE + prefix_tiles
        last_tile = (a.first + a.rows - 1) // TILE + prefix_tiles
        j = Variable(where(a.prefix > 0, 0, first_tile))
        with code.endless([j]) as leave_part:
            leave_part(j.now > last_tile)
            a.j, a.of_prefix = j.now, j.now < prefix_tiles
            a.key = where(a.of_prefix, a.j, a.j - prefix_tiles) * TILE
            a.count = minimum(where(a.of_prefix, a.prefix, a.tokens) - a.key, TILE)
            (_backward if backward else _forward)(code, a, cap)
            further = a.j + 1
            j.now = where(further.equals(prefix_tiles), first_tile, further)


def _given(code: Code, given: Pointer) -> SimpleNamespace:
    """The fields of what attention takes, and the parts of a thread's scratch."""
    a = fields(given, FIELDS, ADDRESSES)
    a.scale = a.scale.astype("i32").view("float")
    a.lows, a.turns, a.sleepers = a.lows.view("i32"), a.turns.view("i32"), a.sleepers.view("i64")
    mine = (a.scratch + given.view("i64").atomic("add", 1) * a.scratch_size).pointer(aligned=True)
    for name in SECTIONS:
        setattr(a, f"own_{name}", mine + getattr(a, f"at_{name}"))
    panel = REGISTERS[code.lanes].width
    a.padded = _count(a.width, panel) * panel
    a.value_padded = _count(a.value_width, panel) * panel
    return a


def _count(number: Value, size: int) -> Value:
    """How many of a size hold a number."""
    return (number + (size - 1)) // size


def _of_tile(a: SimpleNamespace, name: str) -> Rows:
    """The rows of a tile of keys in k, v, or their gradients."""
    columns = a.value_width if "v" in name else a.width
    own, prefix = ((vars(a)[f"{of}{name}"], vars(a)[f"{of}{name}_head"]) for of in ("", "prefix_"))
    start, of_group = (where(a.of_prefix, *both) for both in zip(prefix, own, strict=True))
    step = where(a.of_prefix, columns, vars(a)[f"{name}_row"])
    return Rows(start.pointer() + (a.group * of_group + a.key * step), step, columns)


def _of_head(a: SimpleNamespace, name: str, h: Value) -> Rows:
    """The rows of a block of queries in q, out, or their gradients."""
    step = vars(a)[f"{name}_row"]
    at = vars(a)[name] + (h * vars(a)[f"{name}_head"] + a.first * step)
    return Rows(at, step, a.value_width if "out" in name else a.width)


def _scored(a: SimpleNamespace, r: Value) -> tuple[Value, tuple[Any, ...]]:
    """Head number r of a group, and what `softmax` and `slopes` take first."""
    h = a.group * a.repeats + r
    row = h * a.tokens + a.first
    sight = Sight(a.rows, a.part_lows, a.first, a.key, a.count, a.of_prefix, a.scale)
    return h, (sight, a.own_scores, a.top + row, a.total + row)


def _forward(code: Code, a: SimpleNamespace, cap: float | None) -> None:
    """A tile of keys: S = Q K^T, p = e^(S scale - top), out = out e^(old top - top) + p V."""
    code.call(across, _of_tile(a, "k"), a.count, a.own_keys_across)
    code.call(pack, _of_tile(a, "v"), a.count, a.own_values)
    s, product = a.own_scores, (a.own_product, a.value_padded)
    with code.loop(0, a.repeats) as r:
        h, scored = _scored(a, r)
        q, out = _of_head(a, "q", h), _of_head(a, "out", h)
        code.call(multiply, a.rows, (*q[:2], 1), a.own_keys_across, a.width, (s, TILE), 0)
        code.call(softmax, *scored, a.own_factors, a.own_sums, cap=cap)
        code.call(multiply, a.rows, (s, TILE, 1), a.own_values, a.count, product, 0)
        code.call(merge, a.rows, out, product, a.own_factors, 1)


def _backward(code: Code, a: SimpleNamespace, cap: float | None) -> None:
    """A tile of keys: P, dS, dV = P^T dO, dK = dS^T Q over the heads, and dQ += dS K."""
    k, v, dk, dv = (_of_tile(a, name) for name in OF_PREFIX)
    a.own_factors[0] = 1.0
    code.call(across, k, a.count, a.own_keys_across)
    code.call(across, v, a.count, a.own_values_across)
    code.call(pack, k, a.count, a.own_keys)
    p, ds, d_rows = a.own_scores, a.own_d_scores, (a.own_product, a.padded)
    d_keys, d_values = (a.own_d_keys, a.padded), (a.own_d_values, a.value_padded)
    with code.loop(0, a.repeats) as r:
        h, scored = _scored(a, r)
        q, d_out, dq = (_of_head(a, name, h) for name in ("q", "d_out", "dq"))
        adds = r > 0
        of_v = a.own_values_across, a.value_width
        code.call(multiply, a.rows, (*q[:2], 1), a.own_keys_across, a.width, (p, TILE), 0)
        code.call(multiply, a.rows, (*d_out[:2], 1), *of_v, (ds, TILE), 0)
        code.call(slopes, *scored, ds, cap=cap)
        code.call(pack, q, a.rows, a.own_queries)
        code.call(pack, d_out, a.rows, a.own_d_rows)
        code.call(multiply, a.count, (p, 1, TILE), a.own_d_rows, a.rows, d_values, adds)
        code.call(multiply, a.count, (ds, 1, TILE), a.own_queries, a.rows, d_keys, adds)
        code.call(multiply, a.rows, (ds, TILE, 1), a.own_keys, a.count, d_rows, 0)
        code.call(merge, a.rows, dq, d_rows, a.own_factors, 0)
    with _turn(code, a):
        code.call(merge, a.count, dk, d_keys, a.own_factors, 0)
        code.call(merge, a.count, dv, d_values, a.own_factors, 0)


@contextmanager
def _turn(code: Code, a: SimpleNamespace) -> Iterator[None]:
    """Blocks of queries add to a tile's gradients in their order, whichever thread has them."""
    turn_at, block = a.turns + (a.group * a.all_tiles + a.j), a.block.astype("i32")
    spins = Variable(code.value(0))
    with code.endless([spins]) as leave:
        turn = turn_at.load_atomic()
        leave(turn.equals(block))
        code.own("x86.sse2.pause", [])
        spins.now = spins.now + 1
        with code.when(spins.now > SPINS, [spins]):
            a.sleepers.atomic("add", 1)
            turn.made(WAIT(at=turn_at.text, value=turn.astype("i64").text), "i64")
            a.sleepers.atomic("sub", 1)
            spins.now = code.value(0)
    yield
    turn_at.store_atomic(block - 1)
    with code.when(a.sleepers.load_atomic() > 0):
        block.made(WAKE(at=turn_at.text, value=MOST_THREADS), "i64")


def multiply(
    code: Code, rows: Integer, x: Factor, panels: Aligned, deep: Integer, y: Own, sums: Truth
) -> None:
    """y (rows, columns) = x P, or += x P if it `sums`, with P (columns / panel, deep, panel)."""
    registers = REGISTERS[code.lanes]
    most = registers.tokens
    with code.loop(0, y.columns, registers.width) as c:
        panel, t = panels + c * deep, Variable(code.value(0))

        def call(count: int) -> None:
            x_t, y_t = x.at + t.now * x.down, y.at + c + t.now * y.columns
            of_x, of_y = (x_t, *x[1:]), (y_t, y.columns)
            code.call(few, of_x, panel, deep, of_y, sums, count=count)

        with code.endless([t]) as leave:
            leave(rows - t.now < most)
            call(most)
            t.now = t.now + most
        for count in code.cases(rows - t.now, (*range(1, most), 0)):
            if count:
                call(count)


def few(
    code: Code, x: Factor, panel: Aligned, deep: Integer, y: Own, sums: Truth, *, count: int
) -> None:
    """So many rows of y (count, panel) = x P, or += x P, with every sum in a register."""
    registers = REGISTERS[code.lanes]
    firsts = [v * code.lanes for v in range(registers.vectors)]
    rows, y_rows = zip(
        *[(x.at + x.down * i, y.at + y.columns * i) for i in range(count)], strict=True
    )
    places = [row + first for row in y_rows for first in firsts]
    z = [Variable(code.zeros()) for _ in places]
    with code.when(sums, z):
        for total, place in zip(z, places, strict=True):
            total.now = place.load()
    x_at = Variable(code.value(0))
    with code.loop(0, deep, change=[x_at, *z]) as d:
        w = [(panel + d * registers.width + first).load() for first in firsts]
        for i, row in enumerate(rows):
            x_all = row[x_at.now].splat()
            for v, total in enumerate(z[i * len(w) : (i + 1) * len(w)]):
                total.now = fma(x_all, w[v], total.now)
        x_at.now = x_at.now + x.across
    for total, place in zip(z, places, strict=True):
        place.store(total.now)


def pack(code: Code, x: Rows, rows: Integer, panels: Aligned) -> None:
    """Rows x (rows, columns) as panels (columns / panel, rows, panel), and zeros past the last."""
    width = REGISTERS[code.lanes].width
    with code.loop(0, x.columns, code.lanes) as c:
        mask, to = (x.columns - c).mask(), panels + (c // width * (rows * width) + c % width)
        with code.loop(0, rows) as r:
            (to + r * width).store((x.at + c + r * x.step).load(mask))


def across(code: Code, x: Rows, rows: Integer, panels: Aligned) -> None:
    """Rows x (rows, columns) as panels (rows / panel, columns, panel) of their transpose.

    A square of values is taken at a time. Rows past the last are the last one, and columns past it
    zeros, which the next square or nothing takes the place of.
    """
    width, lanes = REGISTERS[code.lanes].width, code.lanes
    with code.loop(0, rows, lanes) as r:
        to = panels + (r // width * (x.columns * width) + r % width)
        lines = [x.at + minimum(r + lane, rows - 1) * x.step for lane in range(lanes)]
        with code.loop(0, x.columns, lanes) as c:
            mask = (x.columns - c).mask()
            for lane, column in enumerate(_transposed([(line + c).load(mask) for line in lines])):
                (to + (c + lane) * width).store(column)


def _transposed(square: list[Value]) -> list[Value]:
    """The columns of as many rows: it swaps halves, then quarters, and so on."""
    lanes = len(square)
    half = lanes // 2
    while half:
        own = [lane if not lane & half else lanes + lane - half for lane in range(lanes)]
        far = [lane + half if not lane & half else lanes + lane for lane in range(lanes)]
        for at in range(lanes):
            if not at & half:
                near, far_row = square[at], square[at | half]
                square[at], square[at | half] = (
                    near.shuffle(far_row, own),
                    near.shuffle(far_row, far),
                )
        half //= 2
    return square


def merge(
    code: Code, rows: Integer, to: Rows, x: Own, factors: Pointer, factor_step: Integer
) -> None:
    """to = to * factor + x, a row at a time."""
    with code.loop(0, rows) as r:
        factor = factors[r * factor_step].splat()
        to_row, row = to.at + r * to.step, x.at + r * x.columns
        with code.loop(0, to.columns, code.lanes) as c:
            place, added, left = to_row + c, (row + c).load(), to.columns - c
            for whole in code.either(left >= code.lanes):  # a masked store takes longer
                mask = None if whole else left.mask()
                place.store(fma(place.load(mask), factor, added), mask)


def _capped(x: Value, cap: float | None) -> tuple[Value, Value | None]:
    """c tanh(x / c) with its slope, or x without a cap."""
    if cap is None:
        return x, None
    curve = tanh(x, cap)
    return curve * cap, curve.like(1.0) - curve * curve


def _seen(code: Code, r: Value, of: Sight) -> Callable[[Value], Value]:
    """The mask of the keys that row r sees, of those from a number on that counts from `key`."""
    key = of.key.astype("i32")
    low = where(of.of_prefix, 0, of.lows.view("i32")[r] - key).splat()
    high = (of.first + r).astype("i32") - key + 1
    high = where(of.of_prefix, of.keys.astype("i32"), high).splat()

    def seen(c: Value) -> Value:
        keys = c.astype("i32").splat() + code.arange()
        return (keys >= low) & (keys < high)

    return seen


def softmax(
    code: Code,
    sight: Sight,
    s: Aligned,
    tops: Pointer,
    totals: Pointer,
    factors: Aligned,
    sums: Aligned,
    *,
    cap: float | None,
) -> None:
    """s = e^(s scale - top) in place, and what it changes of earlier tiles (online softmax).

    top = max(old top, s scale), factor = e^(old top - top), total = total * factor + sum of s
    """
    scales = sight.scale.splat()
    with code.loop(0, sight.rows) as r:
        seen = _seen(code, r, sight)
        row, most = s + r * TILE, Variable(code.zeros().like(UNSEEN))
        with code.loop(0, TILE, code.lanes, [most]) as c:
            score, _ = _capped((row + c).load() * scales, cap)
            (row + c).store(score)
            score = where(seen(c), score, UNSEEN)
            most.now = where(score > most.now, score, most.now)
        here, old = most.now.max(), tops[r]
        top = where(here > old, here, old)
        tops[r], factors[r] = top, old - top
        top, total = top.splat(), Variable(code.zeros())
        with code.loop(0, TILE, code.lanes, [total]) as c:
            p = where(seen(c), exp((row + c).load() - top), 0.0)
            (row + c).store(p)
            total.now = total.now + p
        sums[r] = total.now.sum()
    with code.loop(0, sight.rows, code.lanes) as r:
        factor, mask, place = exp((factors + r).load()), (sight.rows - r).mask(), totals + r
        (factors + r).store(factor)
        place.store(fma(place.load(mask), factor, (sums + r).load()), mask)


def slopes(
    code: Code,
    sight: Sight,
    s: Aligned,
    lses: Pointer,
    inners: Pointer,
    d: Aligned,
    *,
    cap: float | None,
) -> None:
    """s = P = e^(s scale - lse) and d = dS = (d - inner) * P * scale, in place."""
    scales = sight.scale.splat()
    with code.loop(0, sight.rows) as r:
        seen = _seen(code, r, sight)
        row, d_row = s + r * TILE, d + r * TILE
        lse, inner = lses[r].splat(), inners[r].splat()
        with code.loop(0, TILE, code.lanes) as c:
            score, slope = _capped((row + c).load() * scales, cap)
            p = where(seen(c), exp(score - lse), 0.0)
            (row + c).store(p)
            ds = ((d_row + c).load() - inner) * p * scales
            ds = ds if slope is None else ds * slope
            (d_row + c).store(where(seen(c), ds, 0.0))
