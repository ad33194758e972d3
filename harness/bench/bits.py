"""What the bits of the weights cost in training: a 4-bit and an 8-bit bundle of the same shapes.

Every variant is a process of `harness.bench.ablation_process`; their order alternates. The weights
are read from disk in each step unless the system has them in its cache, so each is measured with
the file in the cache, and with its pages dropped before each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Row,
    Variant,
    around,
    failed_line,
    megabytes,
    place,
    seconds,
    times,
)
from harness.bench.zo2_ablation import ablated
from harness.measure.bundles import bundle_of
from harness.measure.repeats import Outcome, figures, in_turn, peak_ratio, time_ratio
from harness.report.table import Table
from runtime.config.methods import USUAL

FEW, MANY = "4", "8"


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(few: Path, model: str, length: int) -> Row:
        many = bundle_of(Path(bench.config.bundles), model, (length,), bench.note, _export(MANY))
        bundles = {FEW: few, MANY: many}
        found: list[dict[str, Any]] = []
        for variant in bench.ours(*USUAL):
            cases = list(product(bundles, (False, True)))
            runs = {
                _name(variant, bits, cold): partial(
                    ablated, bench, bundles[bits], length, variant, "nothing", cold
                )
                for bits, cold in cases
            }
            outcomes = in_turn(runs, bench.config.repeats, bench.note)
            found += [_figures(variant, bits, cold, outcomes) for bits, cold in cases]
        return {"variants": found, "weights_bytes": {b: _size(path) for b, path in bundles.items()}}

    return bench.rows(measured, export=_export(FEW))


def _export(bits: str) -> dict[str, str]:
    return {"bits": bits}


def _size(bundle: Path) -> int:
    return (bundle / "weights.bin").stat().st_size


def _name(variant: Variant, bits: str, cold: bool) -> str:
    return f"{variant.name}, {bits} bits{', cold file' if cold else ''}"


def _figures(
    variant: Variant, bits: str, cold: bool, outcomes: Mapping[str, Outcome]
) -> dict[str, Any]:
    mine, few = (outcomes[_name(variant, one, cold)] for one in (bits, FEW))
    return {
        "name": _name(variant, bits, cold),
        "method": variant.method,
        "budget": variant.budget,
        "bits": int(bits),
        "cold": cold,
        **figures(mine),
        "ratio": None if bits == FEW else time_ratio(mine, few),
        "memory": None if bits == FEW else peak_ratio(mine, few),
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    lines: list[tuple[str, ...]] = [
        ("model", "tokens", "method", "budget", "file", "bits", "weights MB", "s/step", "low-high",
         "to 4 bits", "low-high", "peak MB", "to 4 bits"),
    ]  # fmt: skip
    for row in rows:
        for one in row.get("variants", ()):
            file = "cold" if one["cold"] else "cached"
            weights = megabytes(row["weights_bytes"][str(one["bits"])])
            start = (one["method"], one["budget"], file, str(one["bits"]), weights)
            lines.append((*place(row), *start, *_cells(one)))
        lines += failed_line(row, lines[0])
    return [Table("Training from 4 and from 8 bits", lines, 6)]


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    if not one["processes"]:
        return ("did not run", *[""] * 5)
    ratio = ("", "") if one["ratio"] is None else around(one["ratio"], times)
    memory = "" if one["memory"] is None else times(one["memory"])
    peak = megabytes(one["peak_footprint_bytes"])
    return (*around(one["step_s"], seconds), *ratio, peak, memory)


BITS = Benchmark(
    "the cost of 8-bit weights beside 4-bit ones in training: seconds of a step, peak footprint",
    None,
    ("qwen2.5-0.5b", "gemma3-1b"),
    (256,),
    _rows,
    _tables,
    (
        "4 bits: as `ondevice export --bits 4`, whose k and v projections have 8; to 4 bits: "
        "divided by the figure of the 4-bit bundle in the same turn; low-high: the range of the "
        "turns",
        "min: each bundle's own smallest budget; cold: the file's pages are dropped from the "
        "system's cache before each step; a hypervisor's cache is out of reach",
    ),
    budgets=("min", "1GB"),
)
