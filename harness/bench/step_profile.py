"""`ondevice bench profile`: where a step's time goes, for each method.

Every variant runs with and without profiling: profiling evaluates the graph at every boundary
between parts, and what that costs is measured too. Invariant: the owners (kinds of work) and the
rest (Python, and all that has no owner) sum to the profiled step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Row,
    Variant,
    around,
    failed_line,
    measured_variant,
    place,
    seconds,
    times,
)
from harness.measure.repeats import Outcome, Process, figures, in_turn, time_ratio
from harness.report.table import Table
from runtime.config.methods import USUAL

OWNERS = (  # in the order of the table; a profile may have others, which come after them
    "read",
    "unpack",
    "linear forward",
    "linear backward",
    "attention forward",
    "attention backward",
    "elementwise forward",
    "elementwise backward",
    "gated forward",
    "gated backward",
    "tiled forward",
    "tiled backward",
    "head",
    "embedding forward",
    "optimizer",
    "update",
    "noise",
)
REST = "Python and the rest"
PROFILED, PLAIN = "profiled", "not profiled"


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        def run(variant: Variant, profile: bool) -> Process:
            process, summary = bench.train(bundle, length, variant, profile)
            return process | (owners(summary) if profile else {})

        variants = bench.ours(*USUAL)
        outcomes = in_turn(
            {
                f"{one.name}, {how}": partial(run, one, how == PROFILED)
                for one in variants
                for how in (PROFILED, PLAIN)
            },
            bench.config.repeats,
            bench.note,
        )
        return {
            "variants": [
                measured_variant(one, outcomes[f"{one.name}, {how}"])
                | {"name": f"{one.name}, {how}"}
                for one in variants
                for how in (PROFILED, PLAIN)
            ],
            "profiles": [
                {
                    **asdict(one),
                    **_profile(*(outcomes[f"{one.name}, {how}"] for how in (PROFILED, PLAIN))),
                }
                for one in variants
            ],
        }

    return bench.rows(measured)


def owners(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a profiled step by owner, and of the whole step: means over all steps."""
    whole = summary["seconds"] / summary["steps"]
    known = summary["seconds_per_step"]
    return {"owners_s": {**known, REST: whole - sum(known.values())}, "profiled_step_s": whole}


def _profile(profiled: Outcome, plain: Outcome) -> dict[str, Any]:
    """Means over processes, so that owners still sum to the step; and what profiling costs."""
    processes = profiled.processes
    names = dict.fromkeys(name for one in processes for name in one["owners_s"])
    return {
        "owners_s": {
            name: statistics.mean([one["owners_s"].get(name, 0.0) for one in processes])
            for name in names
        },
        "profiled_step_s": (
            statistics.mean([one["profiled_step_s"] for one in processes]) if processes else None
        ),
        "plain_step_s": figures(plain)["step_s"],
        "slowdown": time_ratio(profiled, plain),
    }


def order(profiles: Sequence[Mapping[str, Any]]) -> list[str]:
    """The owners of any profile: OWNERS first, then others, then the rest."""
    named = dict.fromkeys(name for one in profiles for name in one["owners_s"])
    others = [name for name in named if name not in OWNERS and name != REST]
    return [
        *(name for name in OWNERS if name in named),
        *others,
        *([REST] if REST in named else []),
    ]


def _tables(rows: Sequence[Row]) -> list[Table]:
    profiled = [one["method"] for row in rows for one in row.get("profiles", ())]
    methods = list(dict.fromkeys(profiled)) or list(USUAL)
    columns = [cell for method in methods for cell in (f"{method}: s", "%")]
    lines = [("model", "tokens", "budget", "owner", *columns)]
    costs = [
        ("model", "tokens", "budget", "method", "not profiled: s/step", "low-high",
         "profiled / not", "low-high"),
    ]  # fmt: skip
    for row in rows:
        profiles = row.get("profiles", ())
        for budget in dict.fromkeys(one["budget"] for one in profiles):
            here = [one for one in profiles if one["budget"] == budget]
            lines += [(*place(row), budget, *line) for line in _lines(here)]
            costs += [(*place(row), budget, one["method"], *_cost(one)) for one in here]
        lines += failed_line(row, lines[0])
    found = [Table("Where the time of a profiled step goes", lines, 4)]
    if len(costs) > 1:
        found.append(Table("What profiling itself costs", costs, 4))
    return found


def _lines(profiles: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name in order(profiles):
        cells: list[str] = []
        for one in profiles:
            time = one["owners_s"].get(name)
            if time is None:
                cells += ["-", "-"]
            else:
                cells += [seconds(time), f"{100 * time / one['profiled_step_s']:.1f}"]
        yield (name, *cells)
    whole = [one["profiled_step_s"] for one in profiles]
    shown = [("did not run", "") if one is None else (seconds(one), "100.0") for one in whole]
    yield ("the step", *(cell for pair in shown for cell in pair))


def _cost(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (*around(one["plain_step_s"], seconds), *around(one["slowdown"], times))


PROFILE = Benchmark(
    "where the time of a step goes: reading, dequantizing, products, attention, head, update",
    None,
    ("qwen2.5-0.5b",),
    (256,),
    _rows,
    _tables,
    (
        "seconds are exclusive: weights that are read or dequantized (unpack) inside a product or "
        "the head count as read and unpack; elementwise: norms, activations, RoPE and residuals; "
        "head: its products, loss and gradient; optimizer, update and noise: of the adapters",
        f"{REST}: a step's seconds minus all owners; all figures are means over all steps of all "
        "processes, first steps included",
        "profiling evaluates the graph at every boundary between parts, which slows a step down; "
        "the last columns show by how much, for timed steps of the same turn",
    ),
)
