"""The memory plan for a budget: tile sizes, kept activations, materialized weights, and the peak.

Planning is pure arithmetic over lowered programs. Beyond the minimum a budget is spent on larger
tiles of weights and slices of MLPs, on kept activations, and then on weights that stay dequantized.
On a CPU it is spent so that a step is predicted to be fastest.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise, product
from typing import Any, NamedTuple

import msgspec

from runtime.bundle.manifest import Manifest
from runtime.core.errors import BudgetError
from runtime.core.remembered import remembered
from runtime.core.units import format_bytes
from runtime.machine.machine import Machine
from runtime.plan.allocator import Held, held_by_allocator, with_kept
from runtime.plan.block_peaks import BlockPeak, PeakModel
from runtime.plan.cost import seconds
from runtime.plan.limit import check_limit
from runtime.plan.lower import LoweredBlock, Sizes, lower, lower_blocks
from runtime.plan.plan import Plan, Task, deciding_differences, scratch_files
from runtime.plan.size_levels import (
    BLOCK,
    LEVELS,
    NARROW,
    OPERATIONS,
    PACKED,
    with_narrow_slices,
)
from runtime.storage.read_ahead import BUFFER_BYTES

GRAPH_FACTOR = 7  # bytes in memory of an opened graph, for each byte of its file
LEAST_CONTEXT = 64  # tokens; a shorter context is not proposed
DECODING_LANES = 16  # chunks of a prompt that are read together, if they fit
EVALUATION_LANES = 8  # rows that are evaluated together, if they fit
OWN_BYTES = 60_000  # of a thread that multiplies: its panel of weights, and its stack
TEXT_BYTES = 500_000  # of the heap by texts of compiled code, and pages that a first step writes
THREAD_BYTES = 100_000  # the stack of one that receives or sends slices of weights
READ_AHEAD_BYTES = 100_000  # the prefetch thread's stack, besides what it fills of its buffer
# The share of the budget that a predicted peak may reach. Of some 100 measured runs, one took 5 %
# more than predicted, beside other work, and the others less than that.
MARGIN = 0.95
# The readings of two equal processes differ by up to this much. `ondevice train` must not refuse
# the smallest budget that `ondevice plan` has named.
READING_BYTES = 200_000


class _Peak(NamedTuple):
    """A predicted peak, and what it consists of besides adapters, gradients and caches."""

    nbytes: int
    process_bytes: int
    held: Held
    blocks: tuple[BlockPeak, ...]


class Planner:
    """Plans for one manifest and machine, whose device need not be that of the bundle's graphs.

    It keeps only the last lowered blocks, because their memory counts for the footprint.
    """

    def __init__(self, manifest: Manifest, machine: Machine) -> None:
        self.manifest = msgspec.structs.replace(manifest, device=machine.device)
        self.machine = machine
        self._blocks: tuple[tuple[object, ...], tuple[LoweredBlock, ...]] = ((), ())
        self._model: tuple[Task, Sizes, PeakModel] | None = None

    def plan(self, task: Task, budget_bytes: int) -> Plan:
        """The plan that fits and is fastest, or on a GPU the most generous one.

        Raises:
            BudgetError: not even the most frugal one fits; the message has the numbers and a way
                out; or the machine's limit is lower than the budget.
        """
        smallest = math.ceil(self._least(task) / MARGIN)
        check_limit(self.machine, budget_bytes, smallest)
        plan = self._whole_blocks(task, budget_bytes, smallest)
        if plan is not None:
            return plan
        for levels in self._level_sets(task):
            plan = self._best(task, levels, budget_bytes, smallest)
            if plan is not None:
                return plan
        for level in self._all_levels(task):
            plan = self.predict(task, level, budget_bytes, smallest)
            if plan.predicted_peak_bytes - READING_BYTES <= MARGIN * budget_bytes:
                return plan
        raise BudgetError(self._refusal(task, budget_bytes, smallest))

    def _best(
        self,
        task: Task,
        levels: tuple[Sizes, ...],
        budget_bytes: int,
        smallest: int,
    ) -> Plan | None:
        """The fastest plan of these sizes that fits, or on a GPU the first; None if none does."""
        best, least = None, math.inf
        spends = task.request.keeps
        for level in levels:
            for lanes in task.demand.lanes:
                fits = self._peak(task, level, lanes).nbytes <= int(MARGIN * budget_bytes)
                if not fits or self._fewest_seconds(task, level, lanes, spends) >= least:
                    continue
                plan = self.predict(task, level, budget_bytes, smallest, lanes)
                on_cpu = self.machine.device == "cpu"
                if spends and (on_cpu or level is levels[0]):
                    plan = self._with_spare(task, level, lanes, plan)
                if not on_cpu:
                    return plan
                now = self.seconds(task, plan, lanes)
                if now < least:
                    best, least = plan, now
        return best

    def seconds(self, task: Task, plan: Plan, lanes: int) -> float:
        """The seconds that a row is predicted to take, of `lanes` that visit blocks together."""
        lowered = self.model(task, plan.sizes).lowered
        kept = plan.kept, plan.materialized_layers
        return seconds(lowered, task.demand.backward, lanes, *kept)

    @remembered
    def _fewest_seconds(self, task: Task, sizes: Sizes, lanes: int, spends: bool) -> float:
        """The seconds that a row is predicted to take at given sizes, if nothing is recomputed."""
        model, layers = self.model(task, sizes), len(self.manifest.layers)
        backward, loads = task.demand.backward, self._loads_weights(model)
        kept = [layers] * (model.lowered.most_kept if spends and backward else 0)
        return seconds(model.lowered, backward, lanes, kept, layers if spends and loads else 0)

    @remembered
    def _peak(self, task: Task, sizes: Sizes, lanes: int) -> _Peak:
        """The predicted peak at given sizes."""
        model = self.model(task, sizes)
        blocks = tuple(model.block(index, lanes) for index in range(len(model.lowered.blocks)))
        held = held_by_allocator(self.machine, model, blocks, sizes.cache_bytes)
        process = self._process_bytes(task, model)
        nbytes = process + model.adapters.current + model.adapters.gradients
        nbytes += model.weight_update_bytes + model.lowered.cached_bytes
        nbytes += held.live_bytes + held.slack_bytes + held.cache_bytes
        return _Peak(nbytes, process, held, blocks)

    def predict(
        self,
        task: Task,
        sizes: Sizes,
        budget_bytes: int,
        minimum_bytes: int,
        lanes: int | None = None,
    ) -> Plan:
        """The plan for given sizes; `lanes` defaults to the fewest that the method accepts."""
        lanes = task.demand.lanes[-1] if lanes is None else lanes
        peak = self._peak(task, sizes, lanes)
        model, held = self.model(task, sizes), peak.held
        lowered = model.lowered
        lanes, evaluation_lanes = _free_lanes(task, model, lanes, held)
        return Plan(
            budget_bytes=budget_bytes,
            limit_bytes=self.machine.limit_bytes,
            predicted_peak_bytes=peak.nbytes,
            minimum_bytes=minimum_bytes,
            process_bytes=peak.process_bytes,
            adapter_bytes=model.adapters.current,
            gradient_bytes=model.adapters.gradients,
            weight_update_bytes=model.weight_update_bytes,
            live_bytes=held.live_bytes,
            slack_bytes=held.slack_bytes,
            cache_bytes=held.cache_bytes,
            mapped_value_bytes=model.mapped_value,
            value_bytes=model.largest_whole_value,
            bucket=task.request.bucket,
            rows=task.request.rows,
            accumulation=task.request.accumulation,
            arithmetic=self.machine.arithmetic,
            threads=self.machine.blas.threads,
            tile_values=sizes.tile_values,
            attention_block=sizes.attention_block,
            slice_columns=lowered.slice_columns,
            slice_values=sizes.slice_values,
            chunk_rows=lowered.execution.chunk_rows,
            evaluation=sizes.evaluation,
            prefetch=task.request.prefetch,
            lanes=lanes,
            evaluation_lanes=evaluation_lanes,
            kept_layers=0,
            kept_bytes=0,
            **_stored(task, model, 0),
            materialized_layers=0,
            materialized_bytes=0,
            blocks=peak.blocks,
            context=task.request.context,
            cached_bytes=lowered.cached_bytes,
            compute_dtype=self.machine.compute_dtype,
            in_place=sizes.in_place,
            compiled=lowered.execution.compiled,
        )

    def peak_of(self, plan: Plan, task: Task) -> int:
        """The peak of an earlier plan on this machine.

        It has the process memory of this machine, and what its threads take beyond what was alive.
        """
        model = self.model(task, plan.sizes)
        others = plan.predicted_peak_bytes - plan.process_bytes
        layers = [
            model.block(index, plan.lanes) for index in range(1, len(model.lowered.blocks) - 1)
        ]
        more = model.adapters.only_in_layers  # which lanes may take besides, see `_free_lanes`
        alive = max(max(each.backward_bytes, each.forward_bytes - more) for each in layers)
        return others + max(0, alive - plan.live_bytes) + self._process_bytes(task, model)

    def again(self, plan: Plan, task: Task) -> Plan:
        """What a planner makes of an earlier plan's choices: an equal plan, if it made that one.

        The choices are the sizes, the batch lanes, and what is kept and stays dequantized. The
        process and its threads are those of the plan; the machine's limit is that of now.
        """
        here = _with_threads(self.machine, plan.threads)
        same = self if here == self.machine else Planner(self.manifest, here)

        def choices(sizes: Sizes) -> tuple[object, ...]:
            tiles = (sizes.tile_values, sizes.attention_block, sizes.slice_values)
            return (*tiles, sizes.in_place, sizes.evaluation)

        known = (BLOCK, *self._all_levels(task))
        levels = [level for level in known if choices(level) == choices(plan.sizes)]
        made = plan
        for level in levels or known[-1:]:  # a plan without its choices only says what differs
            besides = same._process_bytes(task, same.model(task, level)) - here.process_bytes
            process = max(0, plan.process_bytes - besides)
            machine = msgspec.structs.replace(here, process_bytes=process)
            before = Planner(self.manifest, machine)
            for lanes in task.demand.lanes:
                made = before.predict(task, level, plan.budget_bytes, 0, lanes)
                made = before._with_choices_of(plan, task, level, made)
                if not deciding_differences(plan, made):
                    smallest = math.ceil(before._least(task) / MARGIN)
                    return msgspec.structs.replace(made, minimum_bytes=smallest)
        return made

    def _with_choices_of(self, plan: Plan, task: Task, level: Sizes, made: Plan) -> Plan:
        """A new plan that keeps activations and dequantized weights of as many layers as `plan`."""
        layers, model = len(self.manifest.layers), self.model(task, level)
        ways = model.lowered.most_kept if task.demand.backward else 0
        kept = [min(count, layers) for count in plan.kept[:ways]]
        kept = [min(kept[: way + 1]) for way in range(len(kept))]
        loads = self._loads_weights(model)
        materialized = min(plan.materialized_layers, layers) if loads else 0
        head = plan.materialized_head and self._passes_head(task) and materialized == layers
        return self._with(task, level, made, kept, materialized, head)

    def model(self, task: Task, sizes: Sizes) -> PeakModel:
        """The model of bytes in use under given sizes: the last one, if they run alike."""
        last = self._model
        if last is None or last[:2] != (task, sizes):
            last = self._model = (task, sizes, self._new_model(task, sizes, last and last[2]))
        return last[2]

    def _new_model(self, task: Task, sizes: Sizes, last: PeakModel | None) -> PeakModel:
        ways, machine = (*sizes.ways, task.request.context), self.machine
        if self._blocks[0] != ways:
            self._blocks = ways, lower_blocks(self.manifest, sizes, task.request.context)
        lowered = lower(
            *(self.manifest, task.request.bucket, sizes, machine.packed, task.request.context),
            machine.compute_dtype,
            self._compiled(task),
            machine.blas.threads,
            blocks=self._blocks[1],
        )
        if last is None or (last.lowered, last.demand) != (lowered, task.demand):
            return PeakModel(self.manifest, lowered, task.demand)
        return last

    def _compiled(self, task: Task) -> bool:
        """Whether compiled code multiplies: by weights that lie in a map, and stay as they are."""
        in_map = self.manifest.slice is None and not task.demand.trains_weights
        return self.machine.llvm and in_map

    def _loads_weights(self, model: PeakModel) -> bool:
        """Whether weights can stay in memory as products take them: on a GPU also packed ones."""
        if model.execution.compiled:
            return False
        return not self.machine.packed or self.machine.device == "gpu"

    def _process_bytes(self, task: Task, model: PeakModel) -> int:
        """Bytes of the process with its BLAS, opened graphs, kept vectors and prefetch thread."""
        blas, execution = self.machine.blas, model.execution
        panel = min(blas.panel_bytes, model.largest_tile_bytes)
        nbytes = self.machine.process_bytes + task.demand.objects_bytes
        if execution.compiled:
            nbytes += min(blas.panel_bytes, model.largest_whole_value)
            nbytes += blas.threads * OWN_BYTES + TEXT_BYTES
        else:
            nbytes += blas.threads * panel
            if blas.threads > 1:
                nbytes += model.packed_rows * blas.row_bytes
        nbytes += model.graph_file_bytes() * GRAPH_FACTOR + model.vector_bytes
        if task.request.prefetch:
            nbytes += READ_AHEAD_BYTES + min(BUFFER_BYTES, model.largest_packed_bytes)
        if self.manifest.slice is not None:
            nbytes += THREAD_BYTES * self.manifest.slice.of + model.assembled_bytes
        return nbytes

    def _whole_blocks(self, task: Task, budget_bytes: int, smallest: int) -> Plan | None:
        """The plan in which a block is one evaluation, if the budget can keep all activations.

        Without a backward it must have as many batch lanes as the method can use. Else the memory
        is worth more than the time between evaluations.
        """
        if not self._operations(task):
            return None
        plan = self.predict(task, BLOCK, budget_bytes, smallest, task.demand.lanes[0])
        if plan.predicted_peak_bytes > int(MARGIN * budget_bytes):
            return None
        generous = self._with_spare(task, BLOCK, task.demand.lanes[0], plan)
        all_kept = generous.kept_layers == len(self.manifest.layers)
        return generous if all_kept or not task.demand.backward else None

    def _all_levels(self, task: Task) -> tuple[Sizes, ...]:
        return tuple(chain.from_iterable(self._level_sets(task)))

    def _level_sets(self, task: Task) -> tuple[tuple[Sizes, ...], ...]:
        """The sizes that a plan can choose: of a set only where none of the sets before it fits."""
        levels = self._levels(task)
        in_place: tuple[Sizes, ...] = ()
        if self.machine.llvm and task.request.context and self._multiplies_in_place:
            in_place = tuple(replace(level, in_place=True) for level in levels)
        return self._operations(task), in_place, levels

    @property
    def _multiplies_in_place(self) -> bool:
        """Whether every matrix of the layers and the head can be multiplied where it lies."""
        blocks = self.manifest.blocks[1:]
        return all(each.compact for block in blocks for each in self.manifest.matrices_of(block))

    def _operations(self, task: Task) -> tuple[Sizes, ...]:
        """The sizes at which an operation is one evaluation.

        There are none where the trace of some graph does not say how much it allocates, where
        weights are dequantized, or where they are trained, tile by tile.
        """
        known = all(graph.allocated_bytes is not None for graph in self.manifest.graphs.values())
        machine = self.machine
        if machine.device == "cpu" or not (machine.packed and known) or task.demand.trains_weights:
            return ()
        return OPERATIONS

    def _levels(self, task: Task) -> tuple[Sizes, ...]:
        """The sizes that a plan can choose, from generous to frugal."""
        levels = PACKED if self.machine.packed else LEVELS
        if not task.request.keeps:
            return tuple(replace(level, slices=False) for level in levels)
        narrows = task.demand.backward and not self.machine.packed
        return with_narrow_slices(levels) if narrows else levels

    def _least(self, task: Task) -> int:
        """The lowest peak of all levels, which need not be that of the smallest tiles."""
        return min(
            self._peak(task, level, task.demand.lanes[-1]).nbytes
            for level in self._all_levels(task)
            if level.slice_values in (0, NARROW[-1])
        )

    def _with_spare(self, task: Task, sizes: Sizes, lanes: int, plan: Plan) -> Plan:
        """Spend the rest of the budget on kept activations, then on dequantized weights."""
        spare = int(MARGIN * plan.budget_bytes) - plan.predicted_peak_bytes
        model, layers = self.model(task, sizes), len(self.manifest.layers)
        steps = self._steps(task, sizes, lanes)
        fits = bisect_right(steps, spare, key=lambda kept: self._kept_bytes(model, plan, kept))
        kept = steps[fits - 1]
        spare -= self._kept_bytes(model, plan, kept)
        stay = 0  # of the layers, and then the head
        if fits == len(steps) and self._loads_weights(model) and not sizes.in_place:
            most = layers + self._passes_head(task)
            sums = accumulate(map(model.materialized_bytes, range(1, most + 1)))
            stay = bisect_right([*sums], spare)
        return self._with(task, sizes, plan, kept, min(stay, layers), stay > layers)

    def _passes_head(self, task: Task) -> bool:
        """Whether the head is read so often that it may stay: for each token, or step on a GPU."""
        return task.request.context > 0 or self.machine.packed

    @remembered
    def _steps(self, task: Task, sizes: Sizes, lanes: int) -> list[tuple[int, ...]]:
        """How many of the last layers keep how much (see `way_of`), from none to all.

        Each step changes one layer to a later way. Those come first that save the most seconds for
        a byte. A later way may take less memory, because it recomputes what an earlier one keeps.
        """
        model, layers = self.model(task, sizes), len(self.manifest.layers)
        ways = model.lowered.most_kept if task.demand.backward else 0
        kept = [0] * ways
        steps = [tuple(kept)]
        first = 0
        for stop in _worth(self._savings(model, ways, lanes)):
            for count, way in product(range(1, layers + 1), range(first, stop)):
                kept[way] = count
                steps.append(tuple(kept))
            first = stop
        return steps

    def _savings(self, model: PeakModel, ways: int, lanes: int) -> list[tuple[float, int]]:
        """The seconds that all layers save by each way to keep values, and the bytes of those."""
        layers = range(1, len(self.manifest.layers) + 1)
        taken, nbytes = [], []
        for way in range(ways + 1):
            taken.append(seconds(model.lowered, True, lanes, [len(layers)] * way))
            nbytes.append(sum(model.kept_bytes(each, way) for each in layers) if way else 0)
        pairs = zip(pairwise(taken), pairwise(nbytes), strict=True)
        return [(before - after, more - less) for (before, after), (less, more) in pairs]

    def _kept_bytes(self, model: PeakModel, plan: Plan, kept: Sequence[int]) -> int:
        """Bytes that so many layers add to the peak of a plan by keeping activations."""
        if not any(kept):
            return 0
        more = model.live_bytes_keeping(plan.blocks, kept) - plan.live_bytes
        return with_kept(self.machine, model, more, kept)

    def _with(
        self,
        task: Task,
        sizes: Sizes,
        plan: Plan,
        kept: Sequence[int],
        materialized: int,
        head: bool,
    ) -> Plan:
        """A plan with so many layers that keep activations, and that stay dequantized."""
        model = self.model(task, sizes)
        kept_bytes = self._kept_bytes(model, plan, kept)
        last = len(self.manifest.blocks) - 1
        stay = [*range(1, materialized + 1), *([last] if head else [])]
        materialized_bytes = sum(map(model.materialized_bytes, stay))
        counts = [*kept, 0, 0, 0]
        return msgspec.structs.replace(
            plan,
            predicted_peak_bytes=plan.predicted_peak_bytes + kept_bytes + materialized_bytes,
            kept_layers=counts[0],
            kept_products=counts[1],
            kept_mlps=counts[2],
            **_stored(task, model, counts[0]),
            kept_bytes=kept_bytes,
            materialized_layers=materialized,
            materialized_bytes=materialized_bytes,
            materialized_head=head,
        )

    def _refusal(self, task: Task, budget_bytes: int, smallest: int) -> str:
        name = self.manifest.provenance.get("name", self.manifest.family)
        needed = format_bytes(math.ceil(smallest / 1e6) * 1_000_000, up=True)
        tokens = task.request.context or task.request.bucket
        text = (
            f"budget {format_bytes(budget_bytes)} < {needed} needed by {name} at {tokens} tokens; "
            f"the smallest that fits is {needed}"
        )
        room = MARGIN * budget_bytes
        if task.request.context:
            if fits := self._largest_context(task, room):
                return f"{text}, or keep prompt and answers to {fits} tokens together"
        else:
            for bucket in reversed([b for b in self.manifest.buckets if b < task.request.bucket]):
                if self._least(_of(task, bucket=bucket)) <= room:
                    return f"{text}, or use --max-seq-length {bucket}"
        blas = self.machine.blas
        if Planner(self.manifest, _with_threads(self.machine, 1))._least(task) <= room:
            return (
                f"{text}, or set OPENBLAS_NUM_THREADS=1: each of {blas.threads} threads takes "
                "memory"
            )
        if task.demand.holds_gradients:
            return f"{text}; without --grad-accumulation fewer gradients are held"
        return text

    def _largest_context(self, task: Task, room: float) -> int:
        """The largest shorter context, halved some times, that fits; 0 if none does."""
        context = task.request.context // 2
        while context >= LEAST_CONTEXT:
            if self._least(_of(task, context=context)) <= room:
                return context
            context //= 2
        return 0


def _with_threads(machine: Machine, threads: int) -> Machine:
    """The same machine, where so many threads multiply."""
    blas = msgspec.structs.replace(machine.blas, threads=threads)
    return msgspec.structs.replace(machine, blas=blas)


def _of(task: Task, **changes: int) -> Task:
    """The same for another request."""
    return task._replace(request=msgspec.structs.replace(task.request, **changes))


def _free_lanes(task: Task, model: PeakModel, lanes: int, held: Held) -> tuple[int, int]:
    """How many batch lanes fit without a higher peak: for training, and for evaluation."""
    evaluation_lanes = lanes
    if task.demand.trains:
        most = max(EVALUATION_LANES, task.request.rows)
        room = held.live_bytes + model.adapters.only_in_layers
        evaluation_lanes = model.free_lanes(room, lanes, most)
    if task.demand.lanes_in_spare_memory:
        lanes = min(evaluation_lanes, task.demand.lanes_in_spare_memory)
    return lanes, evaluation_lanes


def _stored(task: Task, model: PeakModel, kept: int) -> dict[str, Any]:
    """How many values of layers a file holds for their backward, and the bytes of all such files.

    The last `kept` layers have theirs in memory.
    """
    each = model.lowered.stored_values if task.demand.backward else 0
    values = each * (len(model.lowered.layers) - kept)
    files = scratch_files(model.manifest, task, values, model.adapters.all)
    return {"stored_values": values, "scratch_disk_bytes": sum(files.values())}


def _worth(savings: Sequence[tuple[float, int]]) -> list[int]:
    """The ways to keep values, from 1, up to which layers keep them one after another.

    `savings` has the seconds and the bytes of each way. A way that saves less for a byte than the
    next one is joined with it, and layers go through both together. Ways at the end that save
    nothing are left out.
    """
    groups: list[tuple[int, float, int]] = []
    for way, (saved, nbytes) in enumerate(savings, start=1):
        while groups and saved * groups[-1][2] > groups[-1][1] * nbytes:
            _, others, more = groups.pop()
            saved, nbytes = saved + others, nbytes + more
        groups.append((way, saved, nbytes))
    return [way for way, saved, _ in groups if saved > 0]
