"""The lowering: the engine runs what the planner adds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracles.whole_model import relative_error
from support.bundles import Rng, Tiny
from support.lengths import pairs
from support.models import BUCKETS, FAMILIES, LENGTHS, adapters_of

from runtime.arrays.values import Gradients, Loras, Values
from runtime.engine.executor import Executor
from runtime.engine.graphs import Graphs
from runtime.engine.model import Model
from runtime.operations.base import Call
from runtime.operations.kernel import Run
from runtime.operations.program import Instruction, Program
from runtime.operations.values import bytes_at, gradient_of
from runtime.plan.block_peaks import PeakModel
from runtime.plan.demand import Demand
from runtime.plan.lower import LoweredBlock, Sizes, lower
from runtime.storage.weights import Weights


@dataclass(frozen=True)
class Event:
    """One instruction that was run, or added up: of which block, for how many lanes and tokens."""

    block: str
    instruction: Instruction
    lanes: int
    tokens: int

    def same(self, other: Event) -> bool:
        """Whether it is the very same instruction, and not only an equal one."""
        alike = (self.block, self.lanes, self.tokens) == (other.block, other.lanes, other.tokens)
        return alike and self.instruction is other.instruction


@dataclass(frozen=True)
class RecordingExecutor(Executor):
    """Runs instructions, notes them, and notes what was alive before each."""

    events: list[Event] = field(default_factory=list)
    alive: list[dict[str, int]] = field(default_factory=list)

    def clear(self) -> None:
        self.events.clear()
        self.alive.clear()

    def _note(self, run: Run, lanes: Sequence[Values]) -> None:
        event = Event(run.block.label, run.instruction, len(lanes), run.tokens)
        self.events.append(event)
        (first, *others) = ({name: x.nbytes for name, x in values.items()} for values in lanes)
        assert all(one == first for one in others)
        self.alive.append(first)

    def _forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        self._note(run, lanes)
        super()._forward(run, lanes, loras)

    def _backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> None:
        self._note(run, [values])
        super()._backward(run, values, loras, gradients)


class RecordingPeakModel(PeakModel):
    """Adds up instructions, and notes them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[Event] = []

    def _working_bytes(self, lowered: LoweredBlock, instruction: Instruction, lanes: int) -> int:
        self.events.append(Event(lowered.block.label, instruction, lanes, self.lowered.bucket))
        return super()._working_bytes(lowered, instruction, lanes)


def recording(model: Model) -> RecordingExecutor:
    """Make the model's executor one that records."""
    executor = RecordingExecutor(model.executor.kernels, model.arrays, model.profile)
    model.__dict__["executor"] = executor
    return executor


def walk(
    lowered: LoweredBlock,
    program: Program,
    schedule: Sequence[Instruction],
    given: set[str],
    tokens: int,
) -> list[dict[str, int]]:
    """The values alive before each instruction and their bytes, as the instructions say."""
    call = Call(False, (), 1, tokens, program.values, lowered.block.tensor)
    sizes = {
        name: operation.statistic_bytes(name, call)
        for operation in program.operations
        for name in operation.statistics
    }
    found, alive = [], set(given)
    for one in schedule:
        names = sorted(alive)
        shapes = program.values
        found.append(
            {n: sizes.get(n) or bytes_at(shapes[n.removeprefix("~")], tokens) for n in names}
        )
        made = set(map(gradient_of, one.wanted)) if one.backward else set(one.wanted)
        alive = (alive | made | set(one.statistics)) - set(one.frees)
    return found


def random_sizes(rng: Rng, bucket: int) -> Sizes:
    return Sizes(
        int(10 ** rng.uniform(2.7, 5)),
        int(rng.integers(1, bucket + 8)),
        slices=bool(rng.random() < 0.5),
        chunk_rows=int(rng.choice([0, rng.integers(1, 400)])),
    )


@pytest.mark.parametrize(
    ("family", "buckets", "settings"),
    pairs(FAMILIES, product((BUCKETS, LENGTHS), ({}, {"lora_targets": "k_proj,up_proj"}))),
    ids=str,
)
def test_the_engine_runs_what_the_planner_adds_up(
    tiny: Tiny, rng: Rng, family: str, buckets: tuple[int, ...], settings: dict[str, str]
) -> None:
    """The same instructions, in order, of every block; and what is alive is what they say."""
    bundle = tiny(family, seq_lens=buckets, **settings)
    manifest, adapters = bundle.manifest, adapters_of(bundle, rng)
    for _ in range(2):
        bucket, lanes = int(rng.choice(buckets)), int(rng.integers(1, 4))
        sizes = random_sizes(rng, bucket)
        packed = bool(rng.random() < 0.3)
        print(bucket, lanes, sizes, packed)
        lowered = lower(manifest, bucket, sizes, packed)
        peak = RecordingPeakModel(manifest, lowered, Demand(backward=True))
        model = Model(bundle, Weights(bundle), lowered, Graphs(bundle))
        executor = recording(model)
        shape = (1, bucket, manifest.hidden_size)

        def x(shape: tuple[int, ...] = shape) -> mx.array:
            found = mx.array(rng.standard_normal(shape).astype(np.float32))
            mx.eval(found)
            return found

        for index, one in enumerate(lowered.blocks):
            program, block = one.program, one.block
            peak.events.clear()
            executor.clear()
            given = {program.input, gradient_of(program.output)}
            if index == 0:
                peak.block(index, lanes)
                model.embed(rng.integers(0, manifest.vocab_size, 5))
                expected = walk(one, program, one.forward, set(), bucket)
                executor.alive[0].clear()  # the tokens, which are no value of the program
            elif one.head is None:
                peak.forward(index, lanes)
                peak.block(index, lanes)  # which knows the forward, and adds up the backward
                loras = [adapters.loras(block)] * lanes
                _, kept = model.forward_keeping(block, [x() for _ in range(lanes)], loras, 0)
                model.backward(block, x(), x(), loras[0], (0, kept[0]))
                first = one.keeping[0]
                expected = walk(one, program, first.forward, {program.input}, bucket)
                expected += walk(one, program, first.backward, given | first.values, bucket)
            else:
                peak.forward(index, 1)
                peak.block(index, 1)
                model.hidden(x(), np.arange(4, 7))
                model.head_backward(x(), x((3, manifest.hidden_size)), np.arange(4, 7))
                expected = walk(one, program, one.forward, {program.input}, bucket)
                expected += walk(one, program, one.backward, given, bucket)
            assert len(peak.events) == len(executor.events) > 0
            assert all(a.same(b) for a, b in zip(peak.events, executor.events, strict=True))
            assert executor.alive == expected


@pytest.mark.parametrize(("family", "buckets"), pairs(FAMILIES, [(BUCKETS,), (LENGTHS,)]), ids=str)
def test_what_a_forward_keeps_is_what_the_planner_adds_up(
    tiny: Tiny, rng: Rng, family: str, buckets: tuple[int, ...]
) -> None:
    bundle = tiny(family, seq_lens=buckets)
    manifest, adapters = bundle.manifest, adapters_of(bundle, rng)
    bucket = int(rng.choice(buckets))
    lowered = lower(manifest, bucket, random_sizes(rng, bucket), packed=False)
    peak = PeakModel(manifest, lowered, Demand(backward=True))
    model = Model(bundle, Weights(bundle), lowered, Graphs(bundle))
    executor = recording(model)
    shape = (1, bucket, manifest.hidden_size)
    for index, one in enumerate(lowered.layers, start=1):
        x, dy = (mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
        loras = adapters.loras(one.block)
        dx_again, again = model.backward(one.block, x, dy, loras)
        assert len(one.keeping) == (4 if lowered.slice_columns else 2)
        before = frozenset[str]()
        for way, keeping in enumerate(one.keeping):
            assert before <= keeping.values
            before = keeping.values
            (y,), (kept,) = model.forward_keeping(one.block, [x], [loras], way)
            assert set(kept) == keeping.values
            assert sum(value.nbytes for value in kept.values()) == peak.kept_bytes(index, way)
            assert mx.allclose(y, model.forward(one.block, x, loras), rtol=1e-4, atol=1e-4)
            executor.clear()
            dx, gradients = model.backward(one.block, x, dy, loras, (way, kept))
            assert not kept
            ran = [e.instruction for e in executor.events if e.tokens == bucket]
            outer = [i for i in ran if any(i is other for other in keeping.backward)]
            assert outer == list(keeping.backward)
            assert (dx is None) == (dx_again is None) == (index == 1)
            assert dx is None or (dx_again is not None and mx.allclose(dx, dx_again, 1e-4, 1e-4))
            for name, pair in gradients.items():
                pairs_of = zip(pair, again[name], strict=True)
                assert all(relative_error(a, b) < 1e-5 for a, b in pairs_of)


def test_tiles_are_those_that_the_lowering_says(tiny: Tiny) -> None:
    """The arithmetic of a GPU multiplies by whole matrices, unless they are in floating point."""
    bundle = tiny("llama", "mixed")
    manifest = bundle.manifest
    for packed in (False, True):
        lowered = lower(manifest, 32, Sizes(3000, 7, chunk_rows=33), packed)
        model = Model(bundle, Weights(bundle), lowered, Graphs(bundle))
        assert lowered.execution.chunk_rows == 33
        for name, matrix in manifest.matrices.items():
            sizes = [stop - start for start, stop in model.matrices.ranges(matrix)]
            rows = lowered.execution.tile_rows[name]
            assert max(sizes) == rows and sum(sizes) == matrix.rows
            if packed and not matrix.is_float:
                assert rows == matrix.rows
            else:
                assert rows * matrix.columns <= 3000
