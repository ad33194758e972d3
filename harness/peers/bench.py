"""`ondevice bench peers`: `harness.peers.peers` as a benchmark, a row for each shape and length.

Invariant: rounds that were finished before an interruption are in the last row, and no path of this
machine is in any.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.bench.benchmark import Bench, Benchmark, Row, Variant
from harness.peers import peers as one_bench
from harness.peers.table import HEADINGS, NONE, cells, notes
from harness.report.report import Table
from ondevice.errors import InterruptedRunError, UsageError

OPTION = "--python"


def _rows(bench: Bench) -> Iterator[Row]:
    if len(bench.budgets) != 1:
        raise UsageError(f"--budget {bench.config.budget}: peers takes one budget, of ours")
    for model, lengths in bench.cases.items():
        for length in lengths:
            one_bench.check(model, length, **_settings(bench))
    stopped: list[BaseException] = []

    def measured(bundle: Path, model: str, length: int) -> Row:
        try:
            return _shown(_measure(bench, bundle, model, length), bench.config.python)
        except (InterruptedRunError, KeyboardInterrupt) as stop:
            finished = bench.runs / one_bench.REPORT
            if not finished.exists():
                raise
            stopped.append(stop)
            return _shown(json.loads(finished.read_text()), bench.config.python)

    for row in bench.rows(measured):
        yield row
        if stopped:
            raise InterruptedRunError("interrupted") from stopped[0]


def _measure(bench: Bench, bundle: Path, model: str, length: int) -> dict[str, Any]:
    (bench.runs / one_bench.REPORT).unlink(missing_ok=True)  # of the row before
    return one_bench.peers(
        output=bench.runs,
        preset=model,
        bundle=bundle,
        tokens=length,
        budget=bench.budget(bundle, length, Variant("mebp", "budget", bench.budgets[0])),
        note=bench.note,
        **_settings(bench),
    )


def _settings(bench: Bench) -> dict[str, Any]:
    config = bench.config
    return {
        "steps": config.steps,
        "repeats": config.repeats,
        "names": config.peer_names or one_bench.DEFAULT,
        "python": config.python or sys.executable,
    }


def _shown(report: dict[str, Any], python: str | None) -> Row:
    """A report as a row; the interpreters by what the command line calls them."""
    names = {sys.executable: "python"} | ({python: OPTION} if python else {})
    for found in report["peers"].values():
        for path, name in names.items():
            found["reason"] = found["reason"].replace(path, name)
    return {"report": report, "notes": notes(report)}


def _tables(rows: Sequence[Row]) -> list[Table]:
    lines: list[tuple[str, ...]] = [("model", "tokens", *HEADINGS)]
    for row in rows:
        place = (row["model"], str(row["tokens"]))
        if "report" in row:
            lines += [(*place, *line) for line in cells(row["report"])]
        if row["failed"]:
            lines.append((*place, row["failed"], *(NONE for _ in HEADINGS[1:])))
    return [Table("Ours and the usual tools", lines, 3)]


PEER_BENCH = Benchmark(
    "ours beside PyTorch + PEFT and mlx-lm: seconds and peak footprint of a step, as ratios",
    None,
    ("qwen2.5-0.5b",),
    (256,),
    _rows,
    _tables,
    (
        f"{OPTION} VENV/bin/python names an interpreter that has torch and peft; --peers chooses "
        f"some of {', '.join(one_bench.PEERS)}",
    ),
    budgets=("400MB",),
)
