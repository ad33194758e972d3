"""Folding the steps of a layer that treat every token alike into one that runs by tiles of tokens.

An MLP is linear, glue, linear: what lies between is several times as wide as the hidden states, and
need exist for a tile of tokens only, forward and backward, as in Arctic's sequence tiling (ALST,
arXiv 2506.13996). The weights are read and unpacked once for each tile.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ondevice.manifest import Kind, Manifest, Step, graph_length
from runtime.schedule import activations, outputs

WHOLE = 1 << 62  # more tokens, or values, than there are
GATED_CHUNK = 32_768  # values of a gated activation at once: fewer, and NumPy's calls cost the most
GATED_SCRATCH_BYTES = 2 * GATED_CHUNK * 4


def rows_at_once(rows: int, columns: int, values: int) -> int:
    """How many rows of a matrix are opened at once: tiles of at most so many values, all alike.

    A smaller last tile would save nothing, and leave the heap a hole that the others do not fit.
    """
    most = max(1, values // columns)
    return math.ceil(rows / math.ceil(rows / most))


def fold(kind: Kind) -> Kind:
    """The kind with its longest such stretch as one `tiled` step; as it is where there is none."""
    stretches = []
    for first in range(len(kind.steps)):
        for last in range(first, len(kind.steps)):
            step = kind.steps[last]
            if not (step.op == "linear" or step.tokenwise):
                break
            if _is_foldable(kind, first, last):
                stretches.append((first, last))
    if not stretches:
        return kind
    first, last = max(stretches, key=lambda ends: ends[1] - ends[0])
    inside = kind.steps[first : last + 1]
    (result,) = (linear.output for linear in inside[-1].linears)
    step = Step("tiled", inside[0].inputs, (result,), steps=inside)
    return replace(kind, steps=(*kind.steps[:first], step, *kind.steps[last + 1 :]))


def unfold(kind: Kind, step: Step) -> Kind:
    """The steps of a `tiled` step as a kind of their own."""
    name = f"{kind.name}.{step.outputs[0]}"
    return replace(kind, name=name, input=step.inputs[0], output=step.outputs[0], steps=step.steps)


def token_tile(kind: Kind, rung: int, at_most: int) -> int:
    """The tokens that a kind's `tiled` step takes at once.

    A divisor of the rung that the graphs' own length divides: the largest that is no more than
    `at_most`, or the smallest where there is none; the rung itself where nothing is tiled.
    """
    tiled = next((step for step in kind.steps if step.op == "tiled"), None)
    if tiled is None:
        return rung
    unit = max(graph_length(step, rung) for step in tiled.steps if step.op == "glue")
    sizes = [size for size in range(unit, rung + 1, unit) if rung % size == 0]
    return max((size for size in sizes if size <= at_most), default=unit)


def widest_tile(manifest: Manifest, rung: int, at_most: int) -> int:
    """The most tokens that a layer's `tiled` step takes at once at a rung."""
    kinds = {block.kind for block in manifest.layers}
    return max(token_tile(fold(manifest.kinds[name]), rung, at_most) for name in kinds)


def longest_graph(manifest: Manifest, rung: int) -> int:
    """The most tokens that a layer's token-wise glue takes at once at a rung."""
    steps = (step for block in manifest.layers for step in manifest.kinds[block.kind].steps)
    return max((graph_length(step, rung) for step in steps if step.tokenwise), default=0)


def _is_foldable(kind: Kind, first: int, last: int) -> bool:
    """Of steps that treat tokens alike: linear to linear by glue, one value in and one out."""
    inside, after = kind.steps[first : last + 1], kind.steps[last + 1 :]
    if inside[0].op != "linear" or len(inside[-1].linears) != 1:
        return False
    if not any(step.op == "glue" for step in inside):
        return False
    result = inside[-1].linears[0].output
    made = {name for step in inside for name in outputs(step)}
    read = {name for step in inside for name in activations(step)}
    read_after = {name for step in after for name in step.inputs} | {kind.output}
    return read - made == set(inside[0].inputs) and made & read_after <= {result}
