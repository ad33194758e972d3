"""`ondevice doctor --bench`: three shapes and both methods, as one row of a table to send.

The footprint is that of the smallest budget that fits, the time that of a budget of 1 GB, as in the
README's table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Cells,
    Row,
    each_case,
    failed_lines,
    measured_variant,
    megabytes,
    padded,
    place,
    seconds,
)
from harness.report.table import Table
from runtime.config.methods import USUAL
from runtime.core.units import format_bytes

MODELS = ("gemma3-270m", "qwen2.5-0.5b", "gemma3-1b")
TOKENS = 256
SMALL, LARGE = "min", "1GB"
_SYSTEM = re.compile(r"[^-]+-[\d.]+")  # of "Linux-6.1.0-18-amd64-x86_64-with-glibc2.36"


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    outcomes = bench.in_turn(bundle, length, bench.ours(*USUAL))
    return {
        "variants": [measured_variant(variant, outcome) for variant, outcome in outcomes.items()]
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    lines: list[Cells] = [("model", "tokens", "method", "MB (smallest budget)", "s/step (1 GB)")]
    for row in rows:
        lines += [(*place(row), method, *cells) for method, cells in _cells(row).items()]
    return [padded("Peak footprint and seconds per step", [*lines, *failed_lines(rows, 3)], 3)]


def _cells(row: Row) -> dict[str, tuple[str, str]]:
    """For each method the footprint under the smallest budget, and the time under the large one."""
    by_method: dict[str, dict[str, str]] = {}
    for variant in row.get("variants", ()):
        cells = by_method.setdefault(variant["method"], {"peak": "-", "time": "-"})
        if variant["budget"] == SMALL:
            cells["peak"] = megabytes(variant["peak_footprint_bytes"])
        elif variant["step_s"] is not None:
            cells["time"] = seconds(variant["step_s"]["median"])
    return {method: (cells["peak"], cells["time"]) for method, cells in by_method.items()}


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a table of one row, in Markdown."""
    here = report["machine"]
    system = _SYSTEM.match(here["platform"])
    head = ["machine", "cores", "memory", "system", "MLX", "ondevice"]
    commit, _, changed = (report["commit"] or "").partition("-")
    version = " ".join(filter(None, (report["version"], commit[:12], changed)))
    cells = [
        here["cpu"],
        str(here["cores"]),
        format_bytes(here["memory_bytes"]),
        system[0].replace("-", " ") if system else here["platform"],
        here["mlx"],
        version,
    ]
    for row in report["rows"]:
        for method, (peak, time) in _cells(row).items():
            head.append(f"{row['model']}, {method}: MB / s")
            cells.append(f"{peak} / {time}")
    line = "| {} |".format
    rule = line(" | ".join("---" for _ in head))
    return "\n".join([line(" | ".join(head)), rule, line(" | ".join(map(_escaped, cells)))])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


DOCTOR = Benchmark(
    "one row for this machine: three shapes with MeBP and MeZO (ondevice doctor --bench)",
    None,
    MODELS,
    (TOKENS,),
    each_case(_row),
    _tables,
    ("weights are random, in the models' shapes; a step trains LoRA rank 8 on one row",),
    budgets=(SMALL, LARGE),
)
