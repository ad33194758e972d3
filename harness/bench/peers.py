"""`ondevice bench peers`: our training beside the usual tools, a row for each model and length.

The programs run one after the other, and then again. Invariant: a program that cannot run is in the
report with its reason, and the report has no path of this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    Bench,
    Benchmark,
    Cells,
    Row,
    around,
    megabytes,
    seconds,
    variants_table,
)
from harness.config.bench import parts
from harness.measure.provenance import repository_only
from harness.measure.repeats import Outcome, figures, in_turn, most, time_ratio, turn_ratio
from harness.report.table import Table
from runtime.core.errors import UsageError
from runtime.machine.backend import cores

with repository_only():
    from harness.peers.launch import DEFAULT, METHOD, OURS, PROGRAMS, Setup, inherited
    from harness.peers.trainer import ALPHA, RANK

OPTION = "--python"
BUSY_CORES = 0.1  # more than an idle system uses


def _rows(bench: Bench) -> Iterator[Row]:
    _check(bench, parts(bench.config.peers))
    return bench.rows(_row)


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    names = parts(bench.config.peers) or DEFAULT
    python = bench.config.python or sys.executable
    setup = Setup(
        bundle.resolve(),
        model,
        length,
        bench.config.steps,
        bench.budget(bundle, length, *bench.variants(METHOD)),
        python,
        cores(),
        bench.runs,
        *parts(bench.config.compute_dtype),
    )
    outcomes = in_turn(
        {name: partial(setup.measure, name) for name in names},
        bench.config.repeats,
        bench.note,
        once=[name for name in names if PROGRAMS[name].once],
    )
    for outcome in outcomes.values():
        if outcome.failed:
            outcome.failed = _without_paths(outcome.failed, python)
    variants = [_figures(name, outcomes) for name in names]
    return {
        "budget": setup.budget,
        "compute_dtype": setup.compute_dtype,
        "threads": setup.threads,
        "lora": {"rank": RANK, "alpha": ALPHA, "targets": "all-linear"},
        "inherited": inherited(),
        "variants": variants,
        "notes": notes(variants, inherited()),
    }


def _check(bench: Bench, names: Sequence[str]) -> None:
    if len(bench.budgets) != 1:
        raise UsageError(f"--budget {bench.config.budget}: peers takes one budget, for ours")
    dtype = bench.config.compute_dtype
    if len(parts(dtype)) != 1:
        raise UsageError(f"--compute-dtype {dtype}: peers takes one type, for ours")
    if unknown := [name for name in names if name not in PROGRAMS]:
        raise UsageError(f"peers {', '.join(unknown)}: choose some of {', '.join(PROGRAMS)}")
    if bench.config.python and not Path(bench.config.python).is_file():
        raise UsageError(f"{OPTION} {bench.config.python} is no interpreter; give the path of one")


def _without_paths(reason: str, python: str) -> str:
    """A reason in which interpreters have their names on the command line, not their paths."""
    if python != sys.executable:
        reason = reason.replace(python, OPTION)
    return reason.replace(sys.executable, "python")


def _figures(name: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """A program's figures, with the ratios of ours to them in the turns that both ran."""
    outcome, ours = outcomes[name], outcomes.get(OURS, Outcome())
    compared = ours if name != OURS else Outcome()
    return {
        "name": name,
        "what": PROGRAMS[name].purpose,
        **figures(outcome),
        "training_peak_bytes": most(outcome, "training_peak_bytes"),
        "time_ratio": time_ratio(compared, outcome),
        "peak_ratio": turn_ratio(compared, outcome, lambda process: process["training_peak_bytes"]),
    }


def notes(variants: Sequence[dict[str, Any]], set_before: dict[str, str]) -> list[str]:
    """Notes below the table, on conditions that the figures do not show."""
    texts = [
        f"NOT OUR CHOICE: {name}={value} was set in the environment and ours ran with it; unset it "
        "to measure what ondevice chooses"
        for name, value in set_before.items()
    ]
    trained = {}
    for variant in variants:
        name, processes = variant["name"], variant["processes"]
        if not processes:
            continue
        first = processes[0]
        trained[name] = first["trainable_parameters"]
        texts.append(f"{name}: {variant['what']}, threads {first['threads']}, BLAS {first['blas']}")
        if not first["warm_up_steps"]:
            texts.append(f"{name} ran a single step, whose time includes the warm-up")
        for turn, process in enumerate(processes, start=1):
            if (process["other_cores"] or 0) > BUSY_CORES:
                texts.append(
                    f"NOT ALONE: other programs kept {process['other_cores']:.2f} cores busy while "
                    f"{name} ran in turn {turn}; measure again on an idle machine"
                )
    if len(set(trained.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in trained.items())
        texts.append(f"NOT THE SAME LORA, numbers of trainable parameters differ: {counts}")
    return texts


def _tables(rows: Sequence[Row]) -> list[Table]:
    head = (
        "program", "s/step", "low-high", "training MB", "process MB", "kernel peak MB",
        "time: ours/it", "low-high", "peak: ours/it", "low-high",
    )  # fmt: skip
    return [variants_table("Ours and the usual tools", head, rows, 3, _cells)]


def _cells(row: Row, program: dict[str, Any]) -> Cells:
    if not program["processes"]:
        return (program["name"], "did not run")
    return (
        program["name"],
        *around(program["step_s"], seconds),
        megabytes(program["training_peak_bytes"]),
        megabytes(program["peak_footprint_bytes"]),
        megabytes(program["peak_rss_bytes"]),
        *around(program["time_ratio"], _ratio),
        *around(program["peak_ratio"], _ratio),
    )


def _ratio(value: float) -> str:
    return f"{value:.3f}"


PEERS = Benchmark(
    "ours beside PyTorch + PEFT and mlx-lm: seconds and peak footprint of a step, as ratios",
    ("qwen2.5-0.5b",),
    (256,),
    _rows,
    _tables,
    (
        "ratios are of processes in the same turn, below 1 where ours takes less",
        "training MB leaves out a peer's loading, but not ours; kernel peak: VmHWM on Linux",
        f"{OPTION} VENV/bin/python names an interpreter that has torch and peft; --peers chooses "
        f"some of {', '.join(PROGRAMS)}",
    ),
    budgets=("400MB",),
    unused=("seed",),
)
