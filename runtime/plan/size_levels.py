"""The sizes among which a plan chooses, from generous to frugal."""

from __future__ import annotations

from dataclasses import replace

from runtime.plan.lower import Sizes

LEVELS = (
    Sizes(2 << 20, 64, 48_000_000, slices=True),
    Sizes(3 << 19, 64, 36_000_000, slices=True),
    Sizes(1 << 20, 64, 24_000_000, slices=True),
    Sizes(768 << 10, 64, 12_000_000, slices=True),
    Sizes(640 << 10, 64, 8_000_000, slices=True),
    Sizes(512 << 10, 32, 4_000_000, slices=True),
)
NARROW = (448 << 10, 384 << 10, 320 << 10)  # values of a slice of an MLP, backward
# where products read the quantized words, tiles are those of MLPs alone
PACKED = (
    Sizes(4 << 20, 256, 128_000_000, slices=True),
    Sizes(4 << 20, 256, 96_000_000, slices=True),
    Sizes(4 << 20, 128, 64_000_000, slices=True),
    *LEVELS,
    Sizes(256 << 10, 16, 4_000_000, slices=True),
)
# on a GPU, where an evaluation waits for it: whole blocks, or else whole operations
BLOCK = Sizes(4 << 20, 256, 128_000_000, evaluation="block")
OPERATIONS = tuple(
    Sizes(4 << 20, block, cache, evaluation="operation")
    for block, cache in ((256, 128_000_000), (256, 64_000_000), (128, 32_000_000), (64, 16_000_000))
)


def with_narrow_slices(levels: tuple[Sizes, ...]) -> tuple[Sizes, ...]:
    """Each of the levels, and again with narrower slices in the backward pass of MLPs.

    That pass needs by far the most memory, so all else can have larger tiles.
    """
    values = [*(level.tile_values for level in levels), *NARROW]
    return tuple(
        replace(level, slice_values=slice_values)
        for at, level in enumerate(levels)
        for slice_values in (0, *values[at + 1 :])
    )
