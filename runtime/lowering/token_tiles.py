"""Folding the steps of a layer that treat every token alike into one that runs by tiles of tokens.

An MLP is linear, glue, linear: what lies between is several times as wide as the hidden states, and
need exist for a tile of tokens only, forward and backward, as in Arctic's sequence tiling (ALST,
arXiv 2506.13996). The weights are read and unpacked once for each tile.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ondevice.bundle.manifest import BlockType, Manifest, Step, graph_length
from runtime.lowering.schedule import activations, outputs

WHOLE = 1 << 62  # more tokens, or values, than there are
GATED_CHUNK = 32_768  # values of a gated activation at once: fewer, and NumPy's calls cost the most
GATED_SCRATCH_BYTES = 2 * GATED_CHUNK * 4


def rows_at_once(rows: int, columns: int, values: int) -> int:
    """How many rows of a matrix are opened at once: tiles of at most so many values, all alike.

    A smaller last tile would save nothing, and leave the heap a hole that the others do not fit.
    """
    most = max(1, values // columns)
    return math.ceil(rows / math.ceil(rows / most))


def fold(block_type: BlockType) -> BlockType:
    """The block_type with its longest such stretch as one `tiled` step; as it is where there is none."""
    stretches = []
    for first in range(len(block_type.steps)):
        for last in range(first, len(block_type.steps)):
            step = block_type.steps[last]
            if not (step.op == "linear" or step.tokenwise):
                break
            if _is_foldable(block_type, first, last):
                stretches.append((first, last))
    if not stretches:
        return block_type
    first, last = max(stretches, key=lambda ends: ends[1] - ends[0])
    inside = block_type.steps[first : last + 1]
    (result,) = (linear.output for linear in inside[-1].linears)
    step = Step("tiled", inside[0].inputs, (result,), steps=inside)
    return replace(
        block_type, steps=(*block_type.steps[:first], step, *block_type.steps[last + 1 :])
    )


def unfold(block_type: BlockType, step: Step) -> BlockType:
    """The steps of a `tiled` step as a block_type of their own."""
    name = f"{block_type.name}.{step.outputs[0]}"
    return replace(
        block_type, name=name, input=step.inputs[0], output=step.outputs[0], steps=step.steps
    )


def token_tile(block_type: BlockType, bucket: int, at_most: int) -> int:
    """The tokens that a block_type's `tiled` step takes at once.

    A divisor of the bucket that the graphs' own length divides: the largest that is no more than
    `at_most`, or the smallest where there is none; the bucket itself where nothing is tiled.
    """
    tiled = next((step for step in block_type.steps if step.op == "tiled"), None)
    if tiled is None:
        return bucket
    unit = max(graph_length(step, bucket) for step in tiled.steps if step.op == "elementwise")
    sizes = [size for size in range(unit, bucket + 1, unit) if bucket % size == 0]
    return max((size for size in sizes if size <= at_most), default=unit)


def widest_tile(manifest: Manifest, bucket: int, at_most: int) -> int:
    """The most tokens that a layer's `tiled` step takes at once at a bucket."""
    block_types = {block.type for block in manifest.layers}
    return max(
        token_tile(fold(manifest.block_types[name]), bucket, at_most) for name in block_types
    )


def longest_graph(manifest: Manifest, bucket: int) -> int:
    """The most tokens that a layer's token-wise glue takes at once at a bucket."""
    steps = (step for block in manifest.layers for step in manifest.block_types[block.type].steps)
    return max((graph_length(step, bucket) for step in steps if step.tokenwise), default=0)


def _is_foldable(block_type: BlockType, first: int, last: int) -> bool:
    """Of steps that treat tokens alike: linear to linear by glue, one value in and one out."""
    inside, after = block_type.steps[first : last + 1], block_type.steps[last + 1 :]
    if inside[0].op != "linear" or len(inside[-1].linears) != 1:
        return False
    if not any(step.op == "elementwise" for step in inside):
        return False
    result = inside[-1].linears[0].output
    made = {name for step in inside for name in outputs(step)}
    read = {name for step in inside for name in activations(step)}
    read_after = {name for step in after for name in step.inputs} | {block_type.output}
    return read - made == set(inside[0].inputs) and made & read_after <= {result}
