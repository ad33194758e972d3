"""`ondevice bench profile`: where a step's time goes, MeBP and MeZO beside each other.

Every process runs with the profile and without it, in turn: a profile evaluates between the parts
that it tells apart, and what that costs is measured too. Invariant: the owners and the rest, which
is Python and whatever has no owner, sum to the profiled step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import Bench, Benchmark, Row, Variant, around, seconds, times
from harness.measure.repeats import Outcome, Process, figures, in_turn, time_ratio
from harness.report.report import Table

METHODS = ("mebp", "mezo")
OWNERS = (  # in the order of a table; others of a profile come after them
    "read",
    "unpack",
    "linear forward",
    "linear backward",
    "attention forward",
    "attention backward",
    "glue forward",
    "glue backward",
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

        variants = bench.ours(*METHODS)
        bench.note(f"{model} at {length} tokens")
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
                {
                    "name": f"{one.name}, {how}",
                    **asdict(one),
                    **figures(outcomes[f"{one.name}, {how}"]),
                }
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
    """Means over processes, which keep the sum; the profile's own cost turn by turn."""
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
    """The owners that any profile has: the known ones in their order, others, then the rest."""
    there = dict.fromkeys(name for one in profiles for name in one["owners_s"])
    others = [name for name in there if name not in OWNERS and name != REST]
    return [
        *(name for name in OWNERS if name in there),
        *others,
        *([REST] if REST in there else []),
    ]


def _tables(rows: Sequence[Row]) -> list[Table]:
    head = ("model", "tokens", "budget", "owner")
    lines = [(*head, *(cell for method in METHODS for cell in (f"{method}: s", "%")))]
    costs = [
        ("model", "tokens", "budget", "method", "not profiled: s/step", "low-high",
         "profiled / not", "low-high"),
    ]  # fmt: skip
    for row in rows:
        place = (row["model"], str(row["tokens"]))
        profiles = row.get("profiles", ())
        for budget in dict.fromkeys(one["budget"] for one in profiles):
            here = [one for one in profiles if one["budget"] == budget]
            lines += [(*place, budget, *line) for line in _lines(here)]
            costs += [(*place, budget, one["method"], *_cost(one)) for one in here]
        if row["failed"]:
            lines.append((*place, "", row["failed"], *[""] * (2 * len(METHODS))))
    found = [Table("Where the time of a profiled step goes", lines, 4)]
    if len(costs) > 1:
        found.append(Table("What the profile itself costs", costs, 4))
    return found


def _lines(profiles: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name in order(profiles):
        cells: list[str] = []
        for one in profiles:
            spent = one["owners_s"].get(name)
            if spent is None:
                cells += ["-", "-"]
            else:
                cells += [seconds(spent), f"{100 * spent / one['profiled_step_s']:.1f}"]
        yield (name, *cells)
    whole = [one["profiled_step_s"] for one in profiles]
    shown = [("did not run", "") if one is None else (seconds(one), "100.0") for one in whole]
    yield ("the step", *(cell for pair in shown for cell in pair))


def _cost(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (*around(one["plain_step_s"], seconds), *around(one["slowdown"], times))


PROFILE = Benchmark(
    "where the time of a step goes: read, unpack, products, attention, glue, head, update, Python",
    None,
    ("qwen2.5-0.5b",),
    (256,),
    _rows,
    _tables,
    (
        "exclusive seconds: what is read and unpacked inside a product or the head counts as read "
        "and unpack; glue: norms, activations, positions and residuals; head: its products, loss "
        "and gradient; optimizer (mebp), update and noise (mezo): of the adapters",
        f"{REST}: a step's seconds less all owners; means over all steps of all processes, the "
        "first steps among them",
        "a profile evaluates between the parts that it tells apart, which makes a step slower: by "
        "how much is in the last columns, of timed steps, turn by turn",
    ),
)
