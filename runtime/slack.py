"""What the C library's heap leaves unused between the blocks in use, on a CPU.

glibc serves freed memory again at any size. What lies between is some, and a share of what is
alive beside the tile in hand (which is one block). It is more where an MLP's values do not fit
where a tile was, and grows with the logarithm of the largest value, as Robson's bound does (JACM
21, 1974): much in a backward whose rows are whole, little elsewhere. Where more lies unused, the
meter gives it back (`Meter.aim`). No constant is of a model; LOG.md has what they were read from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.heap import MOST_HEAP_BLOCK_BYTES
from runtime.liveness import Liveness

SMALL_TILE_BYTES = 2_000_000  # below it a forward's tiles leave small holes
SMALL_VALUE_BYTES = 1_500_000  # up to it a value finds a hole wherever it goes


@dataclass(frozen=True)
class Slack:
    """`flat_bytes` whatever is alive, and `share` of what is."""

    flat_bytes: int
    share: float


NONE = Slack(0, 0.0)  # where MLX keeps freed memory itself


def slack_of(model: Liveness) -> Slack:
    """The slack while a plan of these sizes runs, with a heap that serves every block it can."""
    tile = model.workspace.largest_tile()
    if model.work.method != "mebp":
        mlp = model.largest_tiled_value() or model.largest_value()
        if tile >= SMALL_TILE_BYTES:
            flat, share = 2_300_000, 0.10
        elif mlp > tile:  # it does not fit where a tile was
            flat, share = 1_200_000, 0.10
        else:
            flat, share = 800_000, 0.06
        return Slack(flat, share + 0.01 * _doublings(model.largest_value(), tile))
    if model.token_tile < model.work.rung:  # whole values among small tiles of tokens
        value = model.largest_whole_value()
        return Slack(2_400_000, 0.10 + 0.02 * _doublings(value, 0))
    return Slack(1_500_000, 0.05 + 0.12 * _doublings(model.largest_value(), tile // 2))


def _doublings(value: int, place: int) -> float:
    """How often a place, or a small value, is doubled until the value fits or is no heap's."""
    return max(
        0.0, math.log2(min(max(value, 1), MOST_HEAP_BLOCK_BYTES) / max(place, SMALL_VALUE_BYTES))
    )
