"""Attention of new tokens to a ring of past keys and values, into which their own are written.

The reference is `tests.oracles.whole_model.attention` of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays
from runtime.arrays.values import Loras, Values
from runtime.operations.attention import CachedAttention
from runtime.operations.kernel import Kernel, Run
from runtime.operations.prefix_kernel import MASKED, Scoring, attended
from runtime.operations.values import POSITION


@dataclass(frozen=True)
class Ring:
    """Past keys (1, K, S, D) and values (1, K, S, E): position p lies in slot p modulo S."""

    keys: mx.array
    values: mx.array
    arrays: Arrays

    @property
    def slots(self) -> int:
        return int(self.keys.shape[2])

    def write(self, k: mx.array, v: mx.array, position: int) -> None:
        """Put k (1, K, T, D) and v (1, K, T, E) of the tokens from `position` on, T at most S."""
        for ring, new in ((self.keys, k), (self.values, v)):
            put_in_ring(ring, new, position, self.arrays)

    def attend(self, q: mx.array, position: int, scoring: Scoring) -> mx.array:
        """out (1, H, T, E) of the queries q (1, H, T, D) of the tokens from `position` on.

        They see a prefix besides, which is not in the ring. Keys and values of these tokens must
        have been written, and no later ones.
        """
        _, heads, tokens, width = q.shape
        groups = self.keys.shape[1]
        places = ring_positions(self.slots, position + tokens)
        keys, values = (ring[0, :, None, : len(places)] for ring in (self.keys, self.values))
        rows = q.reshape(groups, heads // groups, tokens, width)
        masked = hidden(places, np.arange(position, position + tokens)[:, None], scoring.window)
        mask = mx.array(masked * np.float32(MASKED)) if masked.any() else None
        out, _ = attended(rows, keys, values, mask, scoring, self.arrays)
        return out.reshape(1, heads, tokens, -1)


def ring_positions(slots: int, written: int) -> npt.NDArray[np.int64]:
    """Where the tokens in the used slots are in the sequence, if `written` were written."""
    last = written - 1
    return last - (last - np.arange(min(slots, written))) % slots


def put_in_ring(ring: mx.array, new: mx.array, position: int, arrays: Arrays) -> None:
    """Write tokens (1, K, T, D) from `position` on to their slots of a ring (1, K, S, D)."""
    slots, tokens = ring.shape[2], new.shape[2]
    start = position % slots
    first = min(tokens, slots - start)
    arrays.put(ring, _rows(start, start + first), new[_rows(0, first)])
    if first < tokens:
        arrays.put(ring, _rows(0, tokens - first), new[_rows(first, tokens)])


def _rows(start: int, stop: int) -> tuple[slice, slice, slice]:
    return slice(None), slice(None), slice(start, stop)


def hidden(
    places: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | int, window: int | None
) -> npt.NDArray[np.bool_]:
    """Whether the tokens at these places (S,) are not seen from the positions `rows` (T, 1)."""
    masked = places > rows
    return masked if window is None else masked | (places <= rows - window)


class CachedAttentionKernel(Kernel):
    """The `CachedAttention` operation; lanes are parts of one sequence, in order."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(CachedAttention)
        for values, own in zip(lanes, loras, strict=True):
            q, k, v = (values[name] for name in operation.inputs)
            keys, past = (values[name] for name in operation.cache)
            position = int(values[POSITION].item())  # type: ignore[arg-type]
            ring = Ring(keys, past, self.tools.arrays)
            if not operation.cache_of:
                ring.write(k, v, position)
            scoring = Scoring.of(self.tools, run, values, own)
            values[operation.outputs[0]] = ring.attend(q, position, scoring)
