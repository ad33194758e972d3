"""What the plan says is alive, against what MLX's allocator has seen."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest
from conftest import FAMILIES, program_of
from test_programs import adapters_of

from ondevice.bundle import Bundle
from runtime.liveness import F32, Liveness, Sizes, Work
from runtime.program import Program

Tiny = Callable[..., Bundle]
Rng = np.random.Generator
# MLX allocates for up to ten operations ahead of those that have run, unless its memory limit is
# reached, as in a run: here it always is. On shapes as small as these objects of a few bytes count.
NEVER_OVER, NOT_FAR_UNDER = 1.1, 0.65


class Allocated:
    """The most bytes that were allocated at once, above what was there before."""

    def __init__(self) -> None:
        self.most = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.collect()  # what earlier work left must not be given back while this is watched
        limit = mx.set_memory_limit(0)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        try:
            yield
        finally:
            mx.set_memory_limit(limit)
        self.most = max(self.most, mx.get_peak_memory() - before)


def hidden(rng: Rng, program: Program) -> mx.array:
    shape = (1, program.rung, program.bundle.manifest.hidden_size)
    x = mx.array(rng.standard_normal(shape).astype(np.float32))
    mx.eval(x)
    return x


def drawn(bundle: Bundle, rng: Rng, method: str) -> tuple[Program, Liveness, int]:
    """A program whose tiles are not so small that objects of a few bytes count, and its plan."""
    work = Work(max(bundle.manifest.rungs), arithmetic="unpacked", method=method)
    chosen = Sizes(int(rng.integers(8_000, 60_000)), int(rng.integers(16, 65)), 0)
    live = Liveness(bundle.manifest, work, chosen)
    lanes = int(rng.integers(2, 9)) if method == "mezo" else 1
    program = program_of(
        bundle, work.rung, "unpacked", chosen.tile_values, chosen.query_block, live.chunk_rows
    )
    return program, live, lanes


def predicted(live: Liveness, lanes: int) -> int:
    blocks = [live.block(index, lanes) for index in range(1, len(live.manifest.blocks))]
    return max(max(block.forward_bytes, block.backward_bytes) for block in blocks)


def check(found: Allocated, expected: int) -> None:
    print(found.most, expected)
    assert NOT_FAR_UNDER * expected <= found.most <= NEVER_OVER * expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backward_pass_allocates_what_the_plan_says(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family)
    for _ in range(3):
        program, live, _ = drawn(bundle, rng, "mebp")
        adapters = adapters_of(bundle, rng)
        mx.eval(adapters.tensors)
        found = Allocated()
        for index, block in enumerate(program.blocks[1:-1], start=1):
            loras = adapters.loras(block)
            with found.watching():
                program.forward(block, hidden(rng, program), loras)
            with found.watching():
                x, dy = hidden(rng, program), hidden(rng, program)
                result = program.backward(block, x, dy, loras, index > 1)
                del x, dy
                mx.eval(result)
                del result
        gradients = max(live._block_adapters(block) for block in bundle.manifest.layers)
        check(found, predicted(live, 1) + gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_mezos_forwards_allocate_what_the_plan_says(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family)
    for _ in range(3):
        program, live, lanes = drawn(bundle, rng, "mezo")
        adapters = adapters_of(bundle, rng)
        mx.eval(adapters.tensors)
        found = Allocated()
        for block in program.blocks[1:-1]:
            with found.watching():
                xs = [hidden(rng, program) for _ in range(lanes)]
                program.forward_lanes(block, xs, [adapters.loras(block)] * lanes)
        check(found, predicted(live, lanes))


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_allocates_no_more_than_the_plan_says(
    tiny: Tiny, rng: Rng, family: str, gradient: bool
) -> None:
    bundle = tiny(family)
    for _ in range(3):
        program, live, lanes = drawn(bundle, rng, "mebp" if gradient else "mezo")
        targets = rng.integers(0, bundle.manifest.vocab_size, program.rung)
        found = Allocated()
        with found.watching():
            scored = slice(0, program.rung)
            hs = [program.hidden(hidden(rng, program), scored) for _ in range(lanes)]
            program.losses(hs, [targets] * lanes, gradient)
        head = live.block(len(bundle.manifest.blocks) - 1, lanes)
        small = 64 * program.rung * lanes * F32  # maxima, sums and losses, which nobody counts
        widest = max(live.chunk_rows, bundle.manifest.hidden_size)
        ahead = 4 * program.rung * widest * F32  # now and then, although the limit is 0
        assert found.most <= head.forward_bytes + small + ahead
