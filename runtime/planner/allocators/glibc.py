"""What the C library's heap leaves unused between the blocks in use, on a CPU.

glibc serves freed memory again at any size. What lies between is some, and a share of what is
alive beside the tile in hand (which is one block). It is more where an MLP's values are long, or
do not fit where a tile was, less where long values are mapped (`place_values`), and in a backward
whose rows are whole it grows with the logarithm of the largest value, as Robson's bound does
(JACM 21, 1974).
Where more lies unused, the meter gives it back (`Meter.aim`). No constant is of a model; LOG.md has
what they were read from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.planner.peak import PeakModel
from runtime.system.heap import LONG_VALUE_BYTES, MOST_HEAP_BLOCK_BYTES

SMALL_TILE_BYTES = 2_000_000  # below it a forward's tiles leave small holes
SMALL_VALUE_BYTES = 1_500_000  # up to it a value finds a hole wherever it goes


@dataclass(frozen=True)
class Slack:
    """`flat_bytes` whatever is alive, and `share` of what is."""

    flat_bytes: int
    share: float


NONE = Slack(0, 0.0)  # where MLX keeps freed memory itself


def slack_of(model: PeakModel) -> Slack:
    """The slack while a plan of these sizes runs, with a heap that serves every block it can."""
    tile = model.execution.largest_tile_bytes()
    if not model.demand.backward:
        return _of_forward(model, tile)
    if model.mapped_value >= LONG_VALUE_BYTES:
        return Slack(4_500_000, 0.02)
    if model.lowered.is_tiled:  # whole values among small tiles of tokens
        share = 0.05 + 0.03 * _doublings(model.largest_whole_value, 0)
        if model.largest_tiled_value > SMALL_VALUE_BYTES:
            return Slack(1_200_000, share + 0.06)
        return Slack(2_400_000, share)
    return Slack(2_000_000, 0.05 + 0.12 * _doublings(model.largest_value(), tile // 2))


def _of_forward(model: PeakModel, tile: int) -> Slack:
    """The slack while a block only runs forward, with matrices opened in tiles of so many bytes."""
    value = model.largest_value()
    if model.mapped_value >= LONG_VALUE_BYTES:
        return Slack(1_200_000, 0.02)
    if tile >= SMALL_TILE_BYTES:
        return Slack(2_300_000, 0.10 + 0.01 * _doublings(value, tile))
    mlp = model.largest_tiled_value or value
    share = 0.10 if mlp > tile else 0.03  # it does not fit where a tile was
    return Slack(1_200_000, share + 0.02 * _doublings(model.largest_whole_value, 0))


def _doublings(value: int, place: int) -> float:
    """How often a place, or a small value, is doubled until the value fits or is no heap's."""
    return max(
        0.0, math.log2(min(max(value, 1), MOST_HEAP_BLOCK_BYTES) / max(place, SMALL_VALUE_BYTES))
    )
