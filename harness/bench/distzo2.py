"""DistZO2's Tables 1 to 3: steps that several processes share, and a simulation of machines.

Measured are processes of this machine that `mpirun` connects, with one BLAS thread each, against
one process with one thread in the same turn. The simulation (`harness.bench.simulation`) takes the
time of each part of a step of one process. Table 3 is `harness.bench.slices`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import Bench, Benchmark, Row, Variant, each_case
from harness.bench.distzo2_tables import EXACT, FORWARD_ONLY, SIMULATION, facts, tables, times_of
from harness.bench.published import DISTZO2
from harness.bench.simulation import (
    ASSUMED,
    NETWORKS,
    Assumptions,
    Line,
    Times,
    backprop_s,
    line_through,
    zeroth_order_s,
)
from harness.bench.slices import RANKS, measure
from harness.bench.zo2_ablation import STEPS_PROCESS
from harness.measure.command import flag, mpirun, ondevice
from harness.measure.other_load import other_load
from harness.measure.repeats import (
    Outcome,
    Process,
    figures,
    in_turn,
    peak_ratio,
    reason,
    spread,
    time_ratio,
)
from runtime.bundle.store import open_bundle
from runtime.core.errors import OnDeviceError, UsageError
from runtime.machine.backend import describe

BATCHES = (2, 4, 8)  # rows of a step; DistZO2's are 2, 4, 6 and 8, of 2,048 tokens
PARTS_OF = (1, 4)  # rows of the steps whose parts are measured
UPDATE = ("noise", "update", "optimizer")  # owners of a profile that do not depend on the rows
ONE_THREAD = ("env", "OPENBLAS_NUM_THREADS=1")


@dataclass(frozen=True)
class Sharing:
    """How processes share a step: `data` of them its rows, `perturb` of them its points."""

    name: str
    method: str
    data: int = 1
    perturb: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.perturb

    @property
    def settings(self) -> dict[str, object]:
        """The option of `ondevice train`; none for a process by itself."""
        parts = {"data": self.data, "perturb": self.perturb}
        text = ",".join(f"{name}={count}" for name, count in parts.items() if count > 1)
        return {"parallel": text} if text else {}

    @property
    def launcher(self) -> list[str]:
        """The words that start the processes, with one BLAS thread each."""
        return launcher(self.ranks)

    def simulated_s(self, of: Mapping[str, Times], rows: int) -> float:
        """The simulated step, as if messages took no time."""
        assumed, network = Assumptions(), NETWORKS[0]
        if self.method == EXACT:
            return backprop_s(of[EXACT], assumed, network, rows, self.data)
        split = (self.data, self.perturb)
        return zeroth_order_s(of[FORWARD_ONLY], assumed, network, rows, assumed.points, *split)


def launcher(ranks: int) -> list[str]:
    """The words that start so many processes, with one BLAS thread each."""
    if ranks == 1:
        return [*ONE_THREAD]
    return [*ONE_THREAD, *mpirun(ranks)]


SHARINGS = (
    Sharing("one worker", FORWARD_ONLY),
    Sharing("PertP", FORWARD_ONLY, perturb=2),
    Sharing("DDP", FORWARD_ONLY, data=2),
    Sharing("2D", FORWARD_ONLY, data=2, perturb=2),
    Sharing("MeBP, one worker", EXACT),
    Sharing("MeBP, DDP", EXACT, data=2),
)


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    measured: list[dict[str, Any]] = []
    notes: list[str] = []
    parts: dict[str, Any] | None = None
    budget, *others = bench.budgets
    if others:
        raise UsageError(f"--budget {budget},{','.join(others)}: distzo2 measures at one budget")
    try:
        parts = {
            method: asdict(_times(bench, bundle, length, method, budget))
            for method in (FORWARD_ONLY, EXACT)
        }
    except OnDeviceError as problem:
        notes.append(f"no simulation: {reason(problem)}")
    for batch in BATCHES:
        runs = {
            sharing.name: partial(_process, bench, bundle, length, sharing, batch, budget)
            for sharing in SHARINGS
        }
        outcomes = in_turn(runs, bench.config.repeats, bench.note)
        measured += [
            _figures(sharing, batch, length, outcomes, times_of(parts)) for sharing in SHARINGS
        ]
    sliced: dict[str, Any] | None = None
    try:
        sliced = measure(bench, bundle, length, budget, launcher(RANKS))
    except OnDeviceError as problem:
        notes.append(f"no slices: {reason(problem)}")
    return {
        "cores": describe()["cores"],
        "sliced": sliced,
        "weight_bytes": open_bundle(bundle).manifest.weights_nbytes,
        "variants": measured,
        "times": parts,
        "notes": notes,
    }


def _process(
    bench: Bench, bundle: Path, length: int, sharing: Sharing, batch: int, budget: str
) -> Process:
    variant = Variant(sharing.method, "budget", budget)
    more = {"batch_size": batch, **sharing.settings}
    with other_load() as load:
        process, summary = bench.train(
            bundle, length, variant, more=more, launcher=sharing.launcher
        )
    peaks = [process["peak_footprint_bytes"], *summary.get("worker_peak_bytes", ())]
    return process | {
        "peak_footprint_bytes": max(peaks),
        "worker_peak_bytes": peaks[1:],
        "sent_bytes_per_step": summary.get("sent_bytes_per_step"),
        "other_cores": load.cores,
    }


def _figures(
    sharing: Sharing,
    batch: int,
    length: int,
    outcomes: Mapping[str, Outcome],
    of: Mapping[str, Times] | None,
) -> dict[str, Any]:
    mine = outcomes[sharing.name]
    base = next(each.name for each in SHARINGS if each.method == sharing.method)
    alone = outcomes[base]
    others = [process["other_cores"] for process in mine.processes]
    return {
        "name": f"batch {batch}, {sharing.name}",
        "way": sharing.name,
        "ranks": sharing.ranks,
        "batch": batch,
        "tokens_per_step": batch * length,
        **figures(mine),
        "speedup": None if sharing.name == base else time_ratio(alone, mine),
        "memory": None if sharing.name == base else peak_ratio(mine, alone),
        "other_cores": spread([cores for cores in others if cores is not None]),
        "simulated_s": None if of is None else sharing.simulated_s(of, batch),
    }


def _times(bench: Bench, bundle: Path, length: int, method: str, budget: str) -> Times:
    """The times of one process with one thread, from steps of two numbers of rows."""
    points = Assumptions().points if method == FORWARD_ONLY else 1
    given = {"method": method, "max_seq_length": length, "steps": bench.config.steps}
    given |= {"budget": bench.budget(bundle, length, Variant(method, "budget", budget))}
    given |= {"without": "budget", "profile": True, "scratch": bench.runs}
    measured: list[dict[str, Any]] = []
    for rows in PARTS_OF:
        bench.note(f"{method}, {rows} rows: the parts of a step")
        flags = [flag(name, value) for name, value in {**given, "batch_size": rows}.items()]
        words = ondevice(str(bundle), *flags, module=STEPS_PROCESS, launcher=ONE_THREAD)
        measured.append(json.loads(words))
    few, many = (_parts(each["blocks"]) for each in measured)

    def line(part: str) -> Line:
        a, b = (rows * points for rows in PARTS_OF)
        return line_through((a, few[part]), (b, many[part]))

    layers = measured[0]["layers"]
    return Times(
        layers,
        line("forward"),
        line("head"),
        statistics.mean([few["update"], many["update"]]),
        measured[0]["adapter_parameters"] // layers,
        line("backward"),
    )


def _parts(blocks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a step, of one layer but for the head; the embedding is the head's."""
    embedding, *layers, head = blocks
    update = dict.fromkeys(("forward", "backward"), 0.0)
    passes = dict.fromkeys(update, 0.0)
    for layer in layers:
        for direction in passes:
            owners = layer.get(f"{direction}_owners_s", {})
            own = sum(owners.get(name, 0.0) for name in UPDATE)
            update[direction] += own
            passes[direction] += layer.get(f"{direction}_s", 0.0) - own
    return {
        **{direction: whole / len(layers) for direction, whole in passes.items()},
        "update": sum(update.values()) / len(layers),
        "head": embedding["forward_s"] + head["forward_s"],
    }


DISTZO2_TABLES = Benchmark(
    "DistZO2's Tables 1 to 3: steps shared by processes, and a simulation of 2 to 64 machines",
    DISTZO2,
    ("qwen2.5-0.5b",),
    (64,),
    each_case(_row),
    tables,
    (
        "to one: how many times faster than one process with one BLAS thread in the same turn, and "
        "its footprint; low-high: the range of the turns; the paper's: of its models, whose one "
        "worker is ZO2",
        "other cores: the cores that other programs kept busy meanwhile; oversubscribed: more "
        "processes than cores, which says nothing about as many machines",
        "simulated s: the same step from the times of its parts, as if messages took no time; on a "
        "CPU the times are those in which the process computes, so other programs do not lengthen "
        "them as they do the measured ones",
        f"{SIMULATION}: equal machines like this one with one thread. PertP, DDP and 2D share 64 "
        "rows at 2 points, PertP, many points 2 rows at 64 points, MeBP 64 rows. A machine sends "
        "16 bytes for each of its rows at each of its points, with MeBP each layer's LoRA "
        "gradients in float32, summed while the next layer runs backward; after a step 18 bytes. "
        f"Assumed: {ASSUMED}",
    ),
    facts=facts,
)
