"""The lowering: read alike by planner and engine, at every sequence bucket, for any operation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from support.bundles import copied, manifest_of, rewrite
from support.models import (
    BUCKETS,
    CLOSE,
    FAMILIES,
    LENGTHS,
    adapters_of,
    agree,
    demand_of,
    mebp,
    model_of,
    rows_of,
)
from support.runs import train_arguments

import ondevice
from harness.oracles import reference
from ondevice.bundle.store import Bundle, open_bundle
from ondevice.errors import BundleError
from ondevice.operations.base import WHOLE, Visit
from ondevice.operations.program import Program
from ondevice.operations.values import bytes_at, gradient_of
from runtime.engine.executor import Executor
from runtime.engine.graphs import Graphs
from runtime.engine.kernels.base import Run
from runtime.engine.model import Model
from runtime.engine.values import Gradients, Loras, Values
from runtime.lowering.lower import LoweredBlock, LoweredModel, Sizes, lower
from runtime.lowering.schedule import Instruction
from runtime.planner.demand import Demand
from runtime.planner.peak import PeakModel
from runtime.planner.plan import Plan, Planner, Request
from runtime.run.open import Session
from runtime.storage.weights import Weights
from runtime.system.machine import Blas, Machine

Rng = np.random.Generator
Tiny = Callable[..., Bundle]


# --- planner and engine -----------------------------------------------------------------------


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
        at = len(self.events)
        super()._forward(run, lanes, loras)
        self._drop_tiles(run, at)

    def _backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> None:
        self._note(run, [values])
        at = len(self.events)
        super()._backward(run, values, loras, gradients)
        self._drop_tiles(run, at)

    def _drop_tiles(self, run: Run, at: int) -> None:
        """Of what ran inside, the first tile; the others were the same."""
        inside, body = self.events[at:], run.instruction.body
        if body is None:
            assert not inside
            return
        count = run.tokens // body.tokens
        first = inside[: len(inside) // count]
        alive = self.alive[at : at + len(first)]
        assert len(inside) == count * len(first) and first
        assert all(one.same(first[i % len(first)]) for i, one in enumerate(inside))
        assert self.alive[at:] == alive * count
        del self.events[at + len(first) :], self.alive[at + len(first) :]


class RecordingPeakModel(PeakModel):
    """Adds up instructions, and notes them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[Event] = []

    def _working_bytes(
        self, lowered: LoweredBlock, program: Program, one: Instruction, lanes: int, tokens: int
    ) -> int:
        self.events.append(Event(lowered.block.label, one, lanes, tokens))
        return super()._working_bytes(lowered, program, one, lanes, tokens)


def recording(model: Model) -> RecordingExecutor:
    """Make the model's executor one that records."""
    executor = RecordingExecutor(model.executor.kernels, model.profile)
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
    visit = Visit(False, (), 1, tokens, program.values, lowered.block.tensor)
    sizes = {
        name: operation.statistic_bytes(name, visit)
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
        if one.body is not None:
            inner = one.body
            (source,), (result,) = one.operation.activations, one.operation.results
            begin = {source, gradient_of(result)} if one.backward else {source}
            found += walk(lowered, inner.program, inner.instructions, begin, inner.tokens)
        made = set(map(gradient_of, one.wanted)) if one.backward else set(one.wanted)
        alive = (alive | made | set(one.statistics)) - set(one.frees)
    return found


def random_sizes(rng: Rng, bucket: int) -> Sizes:
    return Sizes(
        int(10 ** rng.uniform(2.7, 5)),
        int(rng.integers(1, bucket + 8)),
        hold=bool(rng.random() < 0.3),
        most_tokens=int(rng.choice([WHOLE, bucket // 2, 1])),
        chunk_rows=int(rng.choice([0, rng.integers(1, 400)])),
    )


@pytest.mark.parametrize("settings", [{}, {"lora_targets": "k_proj,up_proj"}], ids=str)
@pytest.mark.parametrize("buckets", [BUCKETS, LENGTHS], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
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
        peak = RecordingPeakModel(manifest, lowered, Demand(backward=True), "float32")
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
                model.forward_lanes(block, [x() for _ in range(lanes)], loras)
                model.backward(block, x(), x(), loras[0])
                expected = walk(one, program, one.forward, {program.input}, bucket)
                expected += walk(one, program, one.backward, given, bucket)
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


@pytest.mark.parametrize("buckets", [BUCKETS, LENGTHS], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_forward_keeps_is_what_the_planner_adds_up(
    tiny: Tiny, rng: Rng, family: str, buckets: tuple[int, ...]
) -> None:
    bundle = tiny(family, seq_lens=buckets)
    manifest, adapters = bundle.manifest, adapters_of(bundle, rng)
    bucket = int(rng.choice(buckets))
    lowered = lower(manifest, bucket, random_sizes(rng, bucket), packed=False)
    peak = PeakModel(manifest, lowered, Demand(backward=True), "float32")
    model = Model(bundle, Weights(bundle), lowered, Graphs(bundle))
    executor = recording(model)
    shape = (1, bucket, manifest.hidden_size)
    for index, one in enumerate(lowered.layers, start=1):
        x, dy = (mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
        loras = adapters.loras(one.block)
        y, kept = model.forward_keeping(one.block, x, loras)
        assert set(kept) == one.kept
        assert sum(value.nbytes for value in kept.values()) == peak.kept_bytes(index)
        assert mx.array_equal(y, model.forward(one.block, x, loras))
        executor.clear()
        dx, gradients = model.backward(one.block, x, dy, loras, kept)
        assert not kept
        ran = [e.instruction for e in executor.events if e.tokens == bucket]
        outer = [i for i in ran if any(i is other for other in one.backward_kept)]
        assert outer == list(one.backward_kept)
        dx_again, again = model.backward(one.block, x, dy, loras)
        assert (dx is None) == (dx_again is None) == (index == 1)
        assert dx is None or (dx_again is not None and mx.array_equal(dx, dx_again))
        for name, pair in gradients.items():
            assert all(mx.array_equal(a, b) for a, b in zip(pair, again[name], strict=True))


def test_tiles_are_those_that_the_lowering_says(tiny: Tiny, rng: Rng) -> None:
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


# --- shorter buckets --------------------------------------------------------------------------

MACHINE = Machine(
    device="cpu",
    arithmetic="unpacked",
    allocator="glibc",
    process_bytes=30_000_000,
    blas=Blas(1, 1_100_000, 1280),
)


def planned(bundle: Bundle, bucket: int, most_tokens: int = WHOLE, layers: int = 0) -> Plan:
    sizes = Sizes(3000, 7, most_tokens=most_tokens)
    planner = Planner(bundle.manifest, MACHINE)
    plan = planner.predict(Request(bucket), demand_of("mebp"), sizes, 1_000_000_000, 0)
    return msgspec.structs.replace(plan, materialized_layers=layers)


def session_of(bundle: Bundle, plan: Plan) -> Session:
    session = Session(bundle, plan, Weights(bundle), Graphs(bundle))
    session.materialize()
    return session


def order(lowered: LoweredModel) -> list[Any]:
    """The instructions of all blocks, but for the tokens that run at once."""

    def plain(schedule: Sequence[Instruction]) -> list[Any]:
        return [
            (replace(one, body=None), None if one.body is None else plain(one.body.instructions))
            for one in schedule
        ]

    return [
        (one.block, one.adapted, one.kept, one.head, *map(plain, schedules))
        for one in lowered.blocks
        for schedules in [(one.forward, one.keeping, one.backward, one.backward_kept)]
    ]


@pytest.mark.parametrize("most_tokens", [WHOLE, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shorter_bucket_goes_the_same_way(
    tiny: Tiny, rng: Rng, family: str, most_tokens: int
) -> None:
    bundle = tiny(family, seq_lens=(*BUCKETS, *LENGTHS))
    plan = planned(bundle, 128, most_tokens)
    session = session_of(bundle, plan)
    longest = session.model(128)
    assert longest.bucket == 128 and longest.lowered.is_tiled == (most_tokens == 64)
    peaks = {}
    for bucket in (*BUCKETS, *LENGTHS):
        model = session.model(bucket)
        assert model.bucket == bucket and session.model(bucket - 1) is model
        assert model.lowered == lower(bundle.manifest, bucket, plan.sizes, packed=False)
        assert model.graphs is longest.graphs and model.materialized is longest.materialized
        if model.lowered.is_tiled == longest.lowered.is_tiled:
            assert order(model.lowered) == order(longest.lowered)
        peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp"), "float32")
        blocks = [peak.block(index, 1) for index in range(len(bundle.manifest.blocks))]
        peaks[bucket] = max(max(one.forward_bytes, one.backward_bytes) for one in blocks)
    assert list(peaks.values()) == sorted(peaks.values())  # so that a plan for the longest holds


def test_a_row_gives_the_same_gradients_at_every_bucket(
    tiny: Tiny, rng: Rng, tmp_path: Path
) -> None:
    bundle = tiny("gemma3", seq_lens=(*BUCKETS, *LENGTHS))
    session = session_of(bundle, planned(bundle, 128, 64, layers=1))
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng, (15, 9))
    loss, expected = mebp(session.model(128), adapters, rows, tmp_path)
    for length in (16, 32, 64, 96):
        model = session.model(length)
        assert model.bucket == length
        again, found = mebp(model, adapters, rows, tmp_path)
        assert again.loss_sum == pytest.approx(loss.loss_sum, rel=CLOSE)
        agree(found, expected)
    first = {matrix.packed.offset for matrix in bundle.manifest.matrices_of(model.blocks[1])}
    assert {offset for offset, *_ in model.materialized} == first  # of one layer, for all models


def test_a_shorter_bucket_that_tiles_do_not_divide_is_not_used(tiny: Tiny) -> None:
    """It would take more tokens at once than was planned for."""
    bundle = tiny("llama", seq_lens=(32, 67, 128))
    tiled = session_of(bundle, planned(bundle, 128, 64))
    found = [tiled.model(length).bucket for length in (20, 32, 33, 67, 68)]
    assert found == [32, 32, 128, 128, 128]
    alone = session_of(bundle, planned(bundle, 32))
    assert [alone.model(length).bucket for length in (20, 67, 100)] == [32, 67, 128]


# --- an operation that nobody knows yet -------------------------------------------------------

OPERATION = '''
"""Scale: a value times a number."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ondevice.operations.base import Execution, Operation, Tables, Visit, require
from ondevice.operations.values import Shape


class Scale(Operation, frozen=True):
    """y = factor x."""

    inputs: tuple[str]
    outputs: tuple[str]
    factor: float

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def results(self) -> tuple[str, ...]:
        return self.outputs

    @property
    def tokenwise(self) -> bool:
        return True

    def working_bytes(self, visit: Visit, execution: Execution) -> int:
        return 0

    def check(
        self,
        where: str,
        values: Mapping[str, Shape],
        parameters: Mapping[str, tuple[int, ...]],
        tables: Tables,
    ) -> None:
        alike = values[self.inputs[0]] == values[self.outputs[0]]
        require(alike and math.isfinite(self.factor), f"{where}: scale {self.factor}")
'''

KERNEL = '''
"""The kernel of `Scale`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ondevice.operations.dummy import Scale
from runtime.engine.kernels.base import Run, Tools
from runtime.engine.values import Gradients, Loras, Values


@dataclass(frozen=True)
class ScaleKernel:
    """y = factor x, and dx = factor dy."""

    tools: Tools

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        one = run.operation(Scale)
        for values in lanes:
            values[one.outputs[0]] = values[one.inputs[0]] * one.factor
            mx.eval(values[one.outputs[0]])

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        one = run.operation(Scale)
        return {one.inputs[0]: values[f"~{one.outputs[0]}"] * one.factor}
'''

TABLES = {
    "ondevice/operations/table.py": (
        ("from ondevice.operations.elementwise", "from ondevice.operations.dummy import Scale\n"),
        (" | Head\n", " | Scale"),
    ),
    "runtime/engine/kernels/table.py": (
        ("from ondevice.operations.elementwise", "from ondevice.operations.dummy import Scale\n"),
        (
            "from runtime.engine.kernels.elementwise",
            "from runtime.engine.kernels.dummy import ScaleKernel\n",
        ),
        ("    Tiled: TiledKernel,\n", "    Scale: ScaleKernel,\n"),
    ),
}

RUN = """
import json, sys
from pathlib import Path
from runtime.system.backend import prepare
prepare()
import mlx.core as mx
import numpy as np
import runtime, ondevice, harness
from ondevice.operations.dummy import Scale
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Row
from runtime.planner.peak import PeakModel
from support.bundles import as_it_lies
from support.models import demand_of, mebp, model_of

folder = Path(sys.argv[1])
assert all(folder in Path(one.__file__).parents for one in (runtime, ondevice, harness))
given = json.loads((folder / "rows.json").read_text())
rows = [Row(np.array(tokens, np.int32), np.array(scored)) for tokens, scored in given]
for name in sys.argv[2:]:
    bundle = as_it_lies(folder / name)
    adapters = Adapters(bundle.manifest, mx.load(str(folder / "adapters.safetensors")), "float32")
    found = {}
    for kept in (0, 1):
        for most_tokens in (64, 1 << 62):
            model = model_of(bundle, 128, most_tokens=most_tokens)
            assert model.lowered.is_tiled == (most_tokens == 64)
            peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp"), "float32")
            peaks = peak.block(1, 2)
            loss, gradients = mebp(model, adapters, rows, folder, kept)
            gradients["loss"] = mx.array([loss.loss_sum / loss.tokens])
            gradients["peaks"] = mx.array([peaks.forward_bytes, peaks.backward_bytes])
            found |= {f"{kept}.{most_tokens}.{key}": value for key, value in gradients.items()}
    mx.save_safetensors(str(folder / f"{name}.safetensors"), found)
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with one operation more: two new files, and its line in the two tables."""
    folder, packages = tmp_path_factory.mktemp("extended"), Path(ondevice.__file__).parents[1]
    for name in ("ondevice", "runtime", "export", "harness"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(packages / name, folder / name, ignore=left_out)
    (folder / "ondevice/operations/dummy.py").write_text(OPERATION)
    (folder / "runtime/engine/kernels/dummy.py").write_text(KERNEL)
    for file, lines in TABLES.items():
        text = (folder / file).read_text()
        for before, line in lines:
            at = text.index(before)
            at += len(before.rstrip("\n")) if before.startswith(" |") else 0
            text = text[:at] + line + text[at:]
        (folder / file).write_text(text)
    return folder


def python(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (folder, tests)))
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def with_scales(bundle: Bundle, folder: Path, factors: dict[str, float]) -> Path:
    """A copy of the bundle in whose layers some values are scaled before a linear reads them."""
    path = copied(bundle, folder)
    document = manifest_of(path)
    block_type = document["block_types"]["layer0"]
    for name, factor in factors.items():
        operations, values = block_type["operations"], block_type["values"]
        (at,) = (
            index
            for index, one in enumerate(operations)
            if one["op"] == "linear" and one["inputs"] == [name]
        )
        scaled = f"{name}.scaled"
        values[scaled] = values[name]
        operations[at]["inputs"] = [scaled]
        scale = {"op": "scale", "inputs": [name], "outputs": [scaled], "factor": factor}
        operations.insert(at, scale)
    rewrite(path, document)
    return path


BEFORE_MLP, INSIDE_MLP = "mlp.gate_proj.in", "mlp.down_proj.in"


def test_a_new_operation_is_two_files_and_a_line_in_each_table(
    tiny: Tiny, rng: Rng, extended: Path
) -> None:
    """It is checked, planned and run, forward and backward, also inside tiles of tokens."""
    bundle = tiny("qwen2", seq_lens=LENGTHS)
    assert {block.type for block in bundle.manifest.layers} == {"layer0"}
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    mx.save_safetensors(str(extended / "adapters.safetensors"), dict(adapters.tensors))
    written = [(row.tokens.tolist(), row.scored.tolist()) for row in rows]
    (extended / "rows.json").write_text(json.dumps(written))
    first, second = (float(rng.uniform(0.5, 2.5)) for _ in range(2))
    factors = {"same": (1.0, 1.0), "scaled": (first, second)}
    for name, (outside, inside) in factors.items():
        scales = {BEFORE_MLP: outside, INSIDE_MLP: inside}
        path = with_scales(bundle, extended / name, scales)
        with pytest.raises(BundleError, match="scale"):
            open_bundle(path)  # by those who do not know it
    done = python(extended, "-c", RUN, extended, *factors)
    assert done.returncode == 0, done.stderr
    same, scaled = (dict(mx.load(str(extended / f"{name}.safetensors"))) for name in factors)

    dense = reference.dense_model(bundle, adapters)  # what a factor does, autograd says
    for layer in dense.model.layers:
        norm, up = layer.post_attention_layernorm, layer.mlp.up_proj
        norm.weight = norm.weight * first
        up.linear.weight = up.linear.weight * second
        up.scale = up.scale * second
    loss, expected = reference.gradients(dense, [(row.tokens, row.scored) for row in rows])

    for kept in (0, 1):
        for most_tokens in (64, WHOLE):
            prefix = f"{kept}.{most_tokens}."
            of_one, of_both = (
                {n.removeprefix(prefix): v for n, v in one.items() if n.startswith(prefix)}
                for one in (same, scaled)
            )
            model = model_of(bundle, 128, most_tokens=most_tokens)
            plain, gradients = mebp(model, adapters, rows, extended, kept)
            peak = PeakModel(bundle.manifest, model.lowered, demand_of("mebp"), "float32")
            block = peak.block(1, 2)
            forward, backward = of_one.pop("peaks").tolist()
            assert of_both.pop("peaks").tolist() == [forward, backward]
            assert block.forward_bytes <= forward < 1.5 * block.forward_bytes
            assert block.backward_bytes <= backward < 1.5 * block.backward_bytes
            unchanged, changed = of_one.pop("loss").item(), of_both.pop("loss").item()
            assert unchanged == np.float32(plain.loss_sum / plain.tokens)
            assert set(of_one) == set(gradients)  # a factor of 1 changes no bit
            assert all(mx.array_equal(of_one[n], value) for n, value in gradients.items())
            assert changed == pytest.approx(loss, rel=CLOSE)
            agree(of_both, expected)


def test_a_new_operation_is_described_planned_and_trained(tiny: Tiny, extended: Path) -> None:
    """By the commands, which need no word about it."""
    bundle = tiny("qwen2", seq_lens=LENGTHS)
    path = with_scales(bundle, extended / "commands", {BEFORE_MLP: 2.0, INSIDE_MLP: 0.5})
    shown = python(extended, "-m", "ondevice", "inspect", path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("scale -> ") == 2
    trusted = python(extended, "-m", "ondevice", "trust", path, "--yes")  # no model is like this
    assert trusted.returncode == 0, trusted.stderr
    wanted = ("--budget", "200MB", "--max-seq-length", 128)
    plan = python(extended, "-m", "ondevice", "plan", path, *wanted)
    assert plan.returncode == 0, plan.stderr
    for method in ("mebp", "mezo"):
        run = extended / f"run-{method}"
        arguments = train_arguments(path, run, 2, method=method, max_seq_length=128)
        trained = python(extended, "-m", "ondevice", *arguments)
        assert trained.returncode == 0, trained.stderr
        summary = json.loads((run / "summary.json").read_text())
        assert summary["peak_footprint_bytes"] <= 200_000_000
        assert np.isfinite(json.loads((run / "metrics.jsonl").read_text().split("\n")[1])["loss"])


def test_a_wrong_new_operation_is_refused_by_its_own_check(tiny: Tiny, extended: Path) -> None:
    bundle = tiny("qwen2", seq_lens=LENGTHS)
    path = with_scales(bundle, extended / "wrong", {BEFORE_MLP: 1.0})
    document = manifest_of(path)
    operations = document["block_types"]["layer0"]["operations"]
    (scale,) = (one for one in operations if one["op"] == "scale")
    for wrong in ({"factor": 2.0, "more": 1}, {"factor": "2"}, {"inputs": ["x.y"]}):
        kept = dict(scale)
        scale.update(wrong)
        rewrite(path, document)
        refused = python(extended, "-m", "ondevice", "inspect", path)
        assert refused.returncode == 4 and "Traceback" not in refused.stderr
        scale.clear()
        scale.update(kept)
    document["block_types"]["layer0"]["values"][f"{BEFORE_MLP}.scaled"] = [1, "T", 3]
    rewrite(path, document)
    refused = python(extended, "-m", "ondevice", "inspect", path)
    assert refused.returncode == 4 and "scale 1.0" in refused.stderr
