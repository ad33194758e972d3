"""The bytes that the allocator holds at the peak: those in use, and the unused ones beyond that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.arrays.stored import PAGE
from runtime.bundle.manifest import Manifest
from runtime.machine.glibc import HeapUse, unused_bytes
from runtime.machine.machine import Machine
from runtime.operations.base import Call
from runtime.operations.linear import SPLIT_BYTES
from runtime.operations.values import F32
from runtime.plan.block_peaks import BlockPeak, PeakModel

# MLX's own cache reuses buffers of nearly equal sizes only; it is given no more than this
CACHE_PER_LIVE = 1.5
# times as much of what is kept is unused where an operation's values leave holes besides: measured
BESIDE_WIDE = 2
# On a Mac's GPU: arrays that exist at once, each of which ends in the middle of a page; where an
# operation is one evaluation they are adapters and gradients: values are counted in pages
ARRAYS = 128
BESIDE_FORWARD = 0.25  # hidden states; without tiles, the heap of MeZO was seen to have unused


@dataclass(frozen=True)
class Held:
    """Bytes in use without adapters and gradients, unused in the heap, and in MLX's cache."""

    live_bytes: int
    slack_bytes: int
    cache_bytes: int


def held_by_allocator(
    machine: Machine, model: PeakModel, blocks: tuple[BlockPeak, ...], cache_bytes: int
) -> Held:
    """The allocator's bytes while these blocks run, with an MLX cache of at most `cache_bytes`.

    While the embedding or the head runs, no layer's adapters and gradients are in memory, which
    leaves more room for other values.
    """
    heap = machine.heap if machine.allocator == "glibc" else None
    ends = (0, len(blocks) - 1)
    lives = [(model.adapters.perturbing, 0)]
    for index in (lowered.alike for lowered in model.lowered.distinct):
        block = blocks[index]
        spared = model.adapters.only_in_layers if index in ends else 0
        lives.append((max(block.forward_bytes, block.backward_bytes) - spared, index))
    peaks = []
    for live, index in lives:
        use = heap_use(model, live + model.adapters.only_in_layers, index)
        peaks.append((max(0, live), 0 if heap is None else unused_bytes(heap, use)))
    live, slack = max(peaks, key=sum)
    if machine.allocator == "metal":
        slack += ARRAYS * PAGE + (0 if model.execution.one_evaluation else SPLIT_BYTES)
    cache = 0 if heap is not None else min(cache_bytes, int(CACHE_PER_LIVE * live))
    return Held(live, slack, cache)


def heap_use(model: PeakModel, alive_bytes: int, index: int) -> HeapUse:
    """How the heap holds `alive_bytes` while block `index` runs.

    Outside of it may lie the largest tile, the logits, and a whole chunk of the head.
    """
    execution, demand = model.execution, model.demand
    heads = [block.head for block in model.lowered.blocks if block.head is not None]
    own = model.lowered.blocks[index].head
    logits, chunk = (0, 0) if own is None else own.streamed(execution)
    alone = execution.compiled and not demand.backward
    beside = int(BESIDE_FORWARD * alone * execution.bucket * model.manifest.hidden_size) * F32
    return HeapUse(
        alive_bytes,
        _tile_at_peak(model),
        logits,
        chunk,
        model.mapped_value,
        max((head.streamed(execution)[0] for head in heads), default=0),
        demand.backward,
        hole_bytes(model),
        wider_bytes(model.manifest, execution.bucket, model.largest_whole_value),
        beside,
        execution.tiled,
    )


def _tile_at_peak(model: PeakModel) -> int:
    """Bytes of the largest tile; where MLPs are sliced backward, of one of theirs."""
    execution = model.execution
    if not (model.demand.backward and execution.slice_columns):
        return model.largest_tile_bytes
    return max(
        execution.dequantizing_bytes(
            execution.tables.matrices[name], math.prod(execution.tile_shape(name, True))
        )
        for name in execution.slice_columns
    )


def hole_bytes(model: PeakModel) -> int:
    """The most unused bytes of a heap that an operation leaves by arrays of many sizes.

    Where shared keys go along with hidden states, the gradient of a block's output leaves one too:
    it waits while values are recomputed. The input does not, since it is taken apart at once, and
    the parts lie where it was.
    """
    lanes, tokens = model.demand.lanes[-1], model.lowered.bucket
    further = model.manifest.widest - model.manifest.hidden_size
    return (
        _hole_of_ends(model)
        + (tokens * further * F32 if model.demand.backward else 0)
        + max(
            operation.hole_bytes(
                Call(False, (), lanes, tokens, layer.program.values, layer.block.tensor),
                model.execution,
            )
            for layer in model.lowered.distinct_layers
            for operation in layer.program.operations
        )
    )


def _hole_of_ends(model: PeakModel) -> int:
    """Unused bytes because a tied head's gradient stays where the head's arrays lay.

    Unless those above it left enough room, the embedding's adapter, which is as large, finds none.
    """
    waiting = model.adapters.waiting
    if not waiting:
        return 0
    of_head = model.forward(len(model.lowered.blocks) - 1, model.demand.lanes[-1])
    if model.demand.holds_gradients:  # those of earlier micro-batches too: half was seen
        return max(0, min(waiting // 2, 3 * waiting - of_head))
    return max(0, 2 * waiting - of_head)


def wider_bytes(manifest: Manifest, tokens: int, value_bytes: int) -> int:
    """Bytes that a value takes more than the hidden states of so many tokens, at most two of these.

    Wider ones were seen to leave no larger holes.
    """
    hidden = tokens * manifest.hidden_size * F32
    return min(max(0, value_bytes - hidden), 2 * hidden)


def with_kept(machine: Machine, model: PeakModel, live_bytes: int, kept: Sequence[int]) -> int:
    """Bytes of additional kept activations, with what the allocator holds beyond them.

    Without slices of MLPs, which leave holes of other sizes, that is one value at most. `kept` are
    the layers that keep them, see `way_of`.
    """
    share = machine.heap.share_of_kept if machine.allocator == "glibc" else 0.0
    unused = int(live_bytes * share)
    if not model.mapped_value:
        return live_bytes + min(unused, model.largest_whole_value)
    if share and (hole := model.hole_beside_kept(kept)):
        unused = BESIDE_WIDE * unused + hole
    return live_bytes + unused
