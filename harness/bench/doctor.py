"""`ondevice doctor --bench`: three shapes and both methods, as one row of a table to send.

The footprint is that of the smallest budget that fits, the time that of a budget of 1 GB, as in the
README's table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export.sources.random import PRESETS
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
from harness.config.bench import BenchConfig, parts
from harness.report.table import Table
from runtime.bundle.store import MANIFEST
from runtime.config.methods import USUAL
from runtime.core.units import format_bytes, format_seconds

MODELS = ("gemma3-270m", "qwen2.5-0.5b", "gemma3-1b")
TOKENS = 256
SMALL, LARGE = "min", "1GB"
# How often a weight is multiplied with a token in a step of MeBP and one of MeZO: layers forward,
# recomputed and twice backward, and twice forward; the head forward and backward, and twice forward
LAYERS, HEAD = 4 + 2, 2 + 2
SLOWER = 1 + 2  # than the products alone, under a large budget and under the smallest
EXPORT_WEIGHTS_PER_S = 5e6  # drawn, quantized and written, on one core
START_S = 4.0  # of each process
_SYSTEM = re.compile(r"[^-]+-[\d.]+")  # of "Linux-6.1.0-18-amd64-x86_64-with-glibc2.36"


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    outcomes = bench.in_turn(bundle, length, bench.variants(*USUAL))
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
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return "\n".join([line(" | ".join(head)), rule, line(" | ".join(escaped))])


def describe_duration(config: BenchConfig, rate: float) -> str:
    """How long it takes, to say before it begins; `rate` is that of products, in FLOP/s."""
    names = parts(config.models) or DOCTOR.models
    known = [name for name in names if name in PRESETS]
    new = [name for name in known if not (Path(config.bundles) / name / MANIFEST).exists()]
    seconds = sum(sum(_weights(name)) / EXPORT_WEIGHTS_PER_S for name in new)
    seconds += sum(
        _seconds(name, length, rate, config.steps)
        for name in known
        for length in config.lengths or DOCTOR.lengths
    )
    return (
        f"measuring {', '.join(names)} with random weights: about {format_seconds(seconds)}; "
        "Ctrl-C keeps finished processes"
    )


def _seconds(name: str, tokens: int, rate: float, steps: int) -> float:
    """The time of four trainings: two methods, under two budgets."""
    layers, head = _weights(name)
    products = 2.0 * tokens * (LAYERS * layers + HEAD * head)
    return steps * SLOWER * products / rate + 4 * START_S


def _weights(name: str) -> tuple[int, int]:
    """The weights of a preset's layers, and of its head, about: of its matrices."""
    preset = PRESETS[name]
    hidden, heads = preset["hidden_size"], preset["num_attention_heads"]
    size = preset.get("head_dim", hidden // heads)
    attention = 2 * hidden * size * (heads + preset["num_key_value_heads"])
    layer = attention + 3 * hidden * preset["intermediate_size"]
    return preset["num_hidden_layers"] * layer, preset["vocab_size"] * hidden


DOCTOR = Benchmark(
    "one row for this machine: three shapes with MeBP and MeZO (ondevice doctor --bench)",
    MODELS,
    (TOKENS,),
    each_case(_row),
    _tables,
    ("weights are random, in the models' shapes; a step trains LoRA rank 8 on one row",),
    budgets=(SMALL, LARGE),
    unused=("peers", "python", "compute_dtype"),
)
