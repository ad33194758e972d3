"""What packing saves: an epoch over short rows, packed and not, in fresh processes that alternate.

The packed epoch makes one step of each sequence. It is compared with one row a step, and with as
many rows a step as a sequence holds, which makes about as many steps as packing does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
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
from harness.bench.short_rows import COUNT, LONGEST, SHORTEST
from harness.measure.command import flag, ondevice
from harness.measure.repeats import Outcome, Process, figures, in_turn, spread, turn_ratio
from harness.report.table import Table
from runtime.config.methods import USUAL

ROW_LENGTHS = (32, 64)  # sequence lengths for single rows
PACKED = "packed"


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        several = max(2, 2 * length // (SHORTEST + LONGEST))
        hows: dict[str, dict[str, object]] = {
            PACKED: {"pack": True, "max_seq_length": length, "batch_size": 1},
            f"{several} rows a step": {"max_seq_length": LONGEST, "batch_size": several},
            "1 row a step": {"max_seq_length": LONGEST, "batch_size": 1},
        }
        found: list[dict[str, Any]] = []
        for variant in bench.ours(*USUAL):
            outcomes = in_turn(
                {
                    f"{variant.name}, {how}": partial(_process, bench, bundle, variant, given)
                    for how, given in hows.items()
                },
                bench.config.repeats,
                bench.note,
            )
            found += [_figures(variant, how, outcomes) for how in hows]
        return {"variants": found}

    return bench.rows(measured, ROW_LENGTHS)


def _process(bench: Bench, bundle: Path, variant: Variant, given: Mapping[str, object]) -> Process:
    length = int(str(given["max_seq_length"]))
    settings = {
        **given,
        "method": variant.method,
        "budget": bench.budget(bundle, length, variant),
        "seed": bench.config.seed,
        "scratch": str(bench.runs),
    }
    flags = [flag(name, value) for name, value in settings.items()]
    module = "harness.bench.packing_process"
    found: Process = json.loads(ondevice(str(bundle), *flags, module=module))
    return found


def _figures(variant: Variant, how: str, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    mine, packed = (outcomes[f"{variant.name}, {one}"] for one in (how, PACKED))
    found: dict[str, Any] = {
        "name": f"{variant.name}, {how}",
        "how": how,
        "method": variant.method,
        "budget": variant.budget,
        **figures(mine),
    }
    for key in ("epoch_s", "epoch_cpu_s"):
        found[key] = spread([process[key] for process in mine.processes])
        found[f"{key}_to_packed"] = turn_ratio(mine, packed, itemgetter(key))
    return found


def _tables(rows: Sequence[Row]) -> list[Table]:
    lines: list[tuple[str, ...]] = [
        ("model", "tokens", "method", "budget", "rows", "steps", "padding", "s/epoch", "to packed",
         "low-high", "CPU s/epoch", "to packed", "low-high", "peak MB"),
    ]  # fmt: skip
    for row in rows:
        for one in row.get("variants", ()):
            lines.append((*place(row), one["method"], one["budget"], one["how"], *_cells(one)))
        lines += failed_line(row, lines[0])
    return [Table(f"An epoch over {COUNT} rows of {SHORTEST} to {LONGEST} tokens", lines, 5)]


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    if not one["processes"]:
        return ("did not run", *[""] * 8)
    first = one["processes"][0]
    return (
        str(first["steps"]),
        f"{1 - first['tokens'] / first['computed_tokens']:.0%}",
        around(one["epoch_s"], seconds)[0],
        *around(one["epoch_s_to_packed"], times),
        around(one["epoch_cpu_s"], seconds)[0],
        *around(one["epoch_cpu_s_to_packed"], times),
        megabytes(one["peak_footprint_bytes"]),
    )


PACKING = Benchmark(
    f"an epoch over rows of {SHORTEST} to {LONGEST} tokens: packed into sequences, and not",
    None,
    ("llama-135m",),
    (256,),
    _rows,
    _tables,
    (
        "tokens: those of a packed sequence; rows that are not packed are padded to 32 or 64, and "
        "those of a step to the same; padding: its share of all tokens computed",
        "to packed: seconds of an epoch divided by those of the packed one in the same turn; "
        "low-high: the range of the turns; CPU s: of all threads of the process",
        "one row a step makes more updates in an epoch; the others make about equally many",
    ),
)
