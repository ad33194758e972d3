"""Slices of a bundle, measured for DistZO2's Table 3: how fast layers arrive, and what steps take.

Two processes of this machine hold a half each. Their steps are measured against those of processes
with whole bundles, in turn, with the next layer arriving meanwhile and without that.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import Bench, Variant
from harness.measure.command import ondevice
from harness.measure.other_load import other_load
from harness.measure.repeats import Outcome, Process, figures, in_turn, spread, time_ratio
from runtime.bundle.store import open_bundle, write_slices
from runtime.config.methods import USUAL

RANKS, BATCH = 2, 2
PROCESS = "harness.bench.slices_process"
# each rank in the folder of its slice, which is the bundle "."
ENTER = (
    'folder="$0/$((OMPI_COMM_WORLD_RANK + 1))-of-$OMPI_COMM_WORLD_SIZE"; cd "$folder" && exec "$@"'
)


@dataclass(frozen=True)
class Way:
    """How two processes have the weights in their steps."""

    name: str
    sliced: bool
    prefetch: bool = True


WAYS = (Way("whole", False), Way("slices", True), Way("slices, no overlap", True, False))


def measure(
    bench: Bench, bundle: Path, length: int, budget: str, launcher: Sequence[str]
) -> dict[str, Any]:
    """The seconds of layers that arrive and leave, and the steps of each method and way."""
    with tempfile.TemporaryDirectory(dir=bench.runs) as place:
        slices = Path(place).resolve() / "slices"
        cut = write_slices(open_bundle(bundle), RANKS, slices)
        transfers = [
            _transfers(bench, bundle, slices, launcher) for _ in range(bench.config.repeats)
        ]
        steps = []
        for method in USUAL:
            runs = {
                way.name: partial(
                    _process, bench, bundle, slices, length, way, method, budget, launcher
                )
                for way in WAYS
            }
            outcomes = in_turn(runs, bench.config.repeats, bench.note)
            steps += [_figures(way, method, outcomes) for way in WAYS]
    return {
        "ranks": RANKS,
        "disk_bytes": max(each.manifest.held_nbytes for each in cut),
        "transfers": _rates(transfers),
        "steps": steps,
    }


def _transfers(bench: Bench, bundle: Path, slices: Path, launcher: Sequence[str]) -> dict[str, Any]:
    bench.note("layers that arrive and leave, whole and in slices")
    with tempfile.TemporaryDirectory(dir=bench.runs) as scratch:
        words = [str(path.resolve()) for path in (bundle, slices, Path(scratch))]
        found: dict[str, Any] = json.loads(ondevice(*words, module=PROCESS, launcher=launcher))
    return found


def _rates(transfers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Billions of parameters per second, and how many times faster slices are, turn by turn."""
    of: dict[str, list[float]] = {}
    for each in transfers:
        for name, seconds in each["seconds"].items():
            of.setdefault(name, []).extend(each["parameters"] / s / 1e9 for s in seconds)
    rates: dict[str, Any] = {name: spread(values) for name, values in of.items()}
    for name in ("upload", "offload"):
        pairs = zip(of[f"{name}, sliced"], of[name], strict=True)
        rates[f"{name}, ratio"] = spread([sliced / whole for sliced, whole in pairs])
    return rates


def _process(
    bench: Bench,
    bundle: Path,
    slices: Path,
    length: int,
    way: Way,
    method: str,
    budget: str,
    launcher: Sequence[str],
) -> Process:
    more: dict[str, object] = {"batch_size": BATCH, "parallel": f"data={RANKS}"}
    more["prefetch"] = way.prefetch
    if way.sliced:
        more["bundle"] = "."
        launcher = [*launcher, "sh", "-c", ENTER, str(slices)]
    with other_load() as load:
        variant = Variant(method, "budget", budget)
        process, summary = bench.train(bundle, length, variant, more=more, launcher=launcher)
    received = summary.get("received_weight_bytes", 0)
    return process | {
        "peak_footprint_bytes": max(summary["worker_peak_bytes"]),
        "received_bytes_per_step": received / summary["steps"],
        "other_cores": load.cores,
    }


def _figures(way: Way, method: str, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    mine = outcomes[way.name]
    received = [process["received_bytes_per_step"] for process in mine.processes]
    return {
        "name": f"{method}, {way.name}",
        "method": method,
        "way": way.name,
        **figures(mine),
        "longer": None if not way.sliced else time_ratio(mine, outcomes[WAYS[0].name]),
        "received_bytes_per_step": statistics.median(received) if received else None,
    }
