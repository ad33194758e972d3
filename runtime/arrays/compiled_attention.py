"""Attention by code that LLVM has compiled, a tile of keys at a time, in all threads.

A thread takes a block of queries, with all heads that share keys, and goes through the keys that
these queries see (after FlashAttention, arXiv 2205.14135):

    for a tile of keys: S = Q K^T scale     p = e^(S - top)     out = out e^(old top - top) + p V

with the largest score so far, `top`, of each row. No scores are in memory but those of a tile. The
backward rebuilds the probabilities from the log-sum-exp, and adds up the gradients of a tile's keys
and values over the heads:

    P = e^(S - lse)   dV += P^T dO   dS = P * (dO V^T - rowsum(dO * O)) * scale
    dQ += dS K        dK += dS^T Q

Where scores are capped, S is c tanh(S / c), and dS is multiplied by its slope. Blocks add to the
gradients of a tile in their order, so results depend neither on the number of threads nor on which
of them was free. A tile that no query of a block sees is not read. A tile of a prefix is one that
all see. Every sum of products is taken in order, in float32.

It takes windows, packed rows, grouped heads, prefixes, sinks, caps, and heads of any width. It runs
where the plan multiplies weights where they lie (`Execution.compiled`), and so neither on a GPU,
nor beside trained weights or slices of them, nor without LLVM: there, and with a cache of keys,
attention is that of `attention_kernel` and `cached_attention_kernel`. The reference is
`tests.oracles.whole_model.attention`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import quiet
from runtime.arrays.attention_scratch import BLOCK, TILE, scratch_sections
from runtime.arrays.attention_text import ARRAYS, FIELDS, OF_PREFIX, text_of
from runtime.arrays.compiled_products import address, registers
from runtime.arrays.product_text import F32
from runtime.arrays.products import Floats
from runtime.machine.machine_code import Text, compile_all, function
from runtime.machine.threads import Team

Lows = npt.NDArray[np.int32]
"""For each token (T,) the first that it sees; they never fall."""


def compile_for(caps: Iterable[float | None]) -> None:
    """Compile what attention with these caps takes, all at once."""
    each = product((False, True), set(caps), (registers().lanes,))
    compile_all(Text(text_of, how) for how in each)


@dataclass(frozen=True)
class Seen:
    """What queries see: tokens from `lows` on to themselves, and a prefix by key head.

    The prefix has keys (K, m, D) and values (K, m, E).
    """

    scale: float
    lows: Lows
    cap: float | None = None
    prefix: tuple[Floats, ...] = ()


@quiet
def attend(
    team: Team, seen: Seen, arrays: Mapping[str, Floats], top: Floats, total: Floats
) -> None:
    """The output, in zeros `out` (H, T, E), of q (H, T, D), k (K, T, D) and v (K, T, E).

    Both statistics are (H, T). `top` has the largest score of a row that is known already, or
    `UNSEEN`, and `total` the sum of what has been seen of it: they become the log-sum-exp, in
    `total`, and memory for anything.
    """
    _run(team, seen, arrays, False, top, total)
    out = arrays["out"]
    np.divide(out, total[..., None], out=out)
    np.log(total, out=total)
    np.add(total, top, out=total)


@quiet
def attend_back(
    team: Team,
    seen: Seen,
    arrays: Mapping[str, Floats],
    lse: Floats,
    d_prefix: tuple[Floats, ...] = (),
) -> None:
    """Gradients in zeros dq, dk and dv, and those of a prefix, from all else, as `attend` left it.

    lse is (H, T), d_out shaped as out.
    """
    inner = np.einsum("hte,hte->ht", arrays["d_out"], arrays["out"])
    given = {name: array for name, array in arrays.items() if name != "out"}
    _run(team, seen, given, True, lse, inner, d_prefix)


def _run(
    team: Team,
    seen: Seen,
    arrays: Mapping[str, Floats],
    backward: bool,
    top: Floats,
    total: Floats,
    d_prefix: tuple[Floats, ...] = (),
) -> None:
    (heads, tokens, width), groups = arrays["q"].shape, len(arrays["k"])
    value_width = arrays["v"].shape[-1]
    prefix = tuple(map(np.ascontiguousarray, seen.prefix))
    given = dict.fromkeys(FIELDS, 0)
    given |= {"tokens": tokens, "groups": groups, "repeats": heads // groups}
    given |= {"width": width, "value_width": value_width, "scale": _bits(seen.scale)}
    given["prefix"] = prefix[0].shape[1] if prefix else 0
    parts = {name: _in_rows(arrays[name]) for name in ARRAYS if name in arrays}
    for name, array in parts.items():
        steps = (step // F32 for step in array.strides[:2])
        names = name, f"{name}_head", f"{name}_row"
        given |= dict(zip(names, (address(array), *steps), strict=True))
    for name, array in zip(OF_PREFIX, (*prefix, *d_prefix), strict=False):
        given |= {f"prefix_{name}": address(array), f"prefix_{name}_head": array[0].size}
    for name, array in (("top", top), ("total", total)):
        assert array.flags.c_contiguous
        given[name] = address(array)
    turns = _turns(seen.lows, groups, given["prefix"])
    sleepers = np.zeros(1, np.int64)
    given |= {"lows": seen.lows.ctypes.data, "turns": turns.ctypes.data}
    given["sleepers"] = sleepers.ctypes.data
    sections = scratch_sections(width, value_width, backward)
    places = np.cumsum([0, *sections.values()]).tolist()
    given |= {f"at_{name}": at for name, at in zip(sections, places, strict=False)}
    scratch = np.empty(team.threads * places[-1] + 16, np.float32)
    given |= {"scratch_size": places[-1], "scratch": address(scratch) + -address(scratch) % 64}
    numbers = np.array(list(given.values()), np.int64)
    count = groups * math.ceil(tokens / BLOCK)
    work = function(Text(text_of, (backward, seen.cap, registers().lanes)), 2)
    team.run(work, (0, numbers.ctypes.data), count)


def _turns(lows: Lows, groups: int, prefix: int) -> npt.NDArray[np.int32]:
    """For each tile of a group's keys the last block of queries that sees it: the first to add."""
    firsts = lows[::BLOCK] // TILE  # the first tile of each block
    tiles = np.arange(math.ceil(len(lows) / TILE))
    last = np.searchsorted(firsts, tiles, side="right") - 1
    of_prefix = np.full(math.ceil(prefix / TILE), len(firsts) - 1)
    return np.tile(np.concatenate([of_prefix, last]).astype(np.int32), groups)


def _in_rows(array: Floats) -> Floats:
    """The array, or a copy of it, whose rows have their values one after the other."""
    return array if array.strides[-1] == F32 else np.ascontiguousarray(array)


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)
