"""The MeBP paper's Table 3 and Figure 2: where a step's time and memory go, block by block.

Both come from profiled runs under our plan and the paper's. Profiling evaluates the graph at every
boundary between parts: it explains a step and does not time one, and it counts the first step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    NOT_PUBLISHED,
    Bench,
    Benchmark,
    Cells,
    Row,
    Variant,
    around,
    each_case,
    measured_variant,
    megabytes,
    seconds,
    times,
    variants_table,
)
from harness.bench.published import (
    BACKWARD_OVER_FORWARD,
    DECOMPRESSION,
    MEBP_FIGURE2,
    MEBP_TABLE3,
    MODELS,
)
from harness.measure.repeats import Outcome, Process, spread
from harness.report.blocks import block_charts
from harness.report.chart import Chart
from harness.report.table import Table

OWNERS = ("unpack", "read")
PARTS = ("forward", "backward", "head", "step")
PROFILED = (
    "the figures are of a profile, which counts every step and evaluates the graph at every "
    "boundary between parts"
)
Block = dict[str, Any]


def _row(bench: Bench, bundle: Path, model: str, length: int) -> Row:
    variants = bench.variants(*MEBP_TABLE3.methods)
    outcomes = bench.in_turn(bundle, length, variants, _kept, profile=True)
    share = DECOMPRESSION.get((model, length))
    return {
        "variants": [_figures(variant, outcome) for variant, outcome in outcomes.items()],
        "published_percent": None if share is None else asdict(share),
        "published_backward_over_forward": BACKWARD_OVER_FORWARD.get((model, length)),
    }


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in ("steps", "seconds", "blocks", "seconds_per_step")}


def _figures(variant: Variant, outcome: Outcome) -> dict[str, Any]:
    shares = [_shares(process) for process in outcome.processes]
    blocks = together([process.pop("blocks") for process in outcome.processes])
    return {
        **measured_variant(variant, outcome),
        "shares": {
            owner: {part: spread([share[owner][part] for share in shares]) for part in PARTS}
            for owner in OWNERS
        },
        "blocks": blocks,
        "backward_over_forward": _backward_over_forward(blocks),
    }


def _shares(process: Process) -> dict[str, dict[str, float]]:
    """Of each owner, the share of a pass over the layers, of the head, and of the whole step.

    The head runs forward and backward in one pass over the vocabulary, so it has its own share.
    """
    layers, head = layers_and_head(process["blocks"])

    def share(owner: str, blocks: Sequence[Block], direction: str) -> float:
        whole = sum(block[f"{direction}_s"] for block in blocks)
        return float(
            sum(block[f"{direction}_owners_s"].get(owner, 0.0) for block in blocks) / whole
        )

    step_s = process["seconds"] / process["steps"]
    return {
        owner: {
            "forward": share(owner, layers, "forward"),
            "backward": share(owner, layers, "backward"),
            "head": share(owner, [head], "forward"),
            "step": process["seconds_per_step"].get(owner, 0.0) / step_s,
        }
        for owner in OWNERS
    }


def layers_and_head(blocks: Sequence[Block]) -> tuple[Sequence[Block], Block]:
    """The layers, the only blocks with a backward pass of their own, and the head."""
    return [block for block in blocks if "backward_s" in block], blocks[-1]


def together(profiles: Sequence[Sequence[Block]]) -> list[Block]:
    """The profiles of several processes as one: median seconds, largest peaks."""
    merged: list[Block] = []
    for blocks in zip(*profiles, strict=True):
        median: Block = {"name": blocks[0]["name"]}
        for key in list(blocks[0])[1:]:
            values = [block[key] for block in blocks]
            if key.endswith("_peak_bytes"):
                median[key] = max(values)
            elif key.endswith("_owners_s"):
                owners = dict.fromkeys(owner for value in values for owner in value)
                median[key] = {
                    owner: statistics.median([value.get(owner, 0.0) for value in values])
                    for owner in owners
                }
            else:
                median[key] = statistics.median(values)
        merged.append(median)
    return merged


def _backward_over_forward(blocks: Sequence[Block]) -> dict[str, float] | None:
    """The median over the layers of their backward's memory and time over their forward's."""
    if not blocks:
        return None
    keys = {"memory": "_peak_bytes", "time": "_s"}
    return {
        name: statistics.median(
            [
                layer[f"backward{key}"] / layer[f"forward{key}"]
                for layer in layers_and_head(blocks)[0]
            ]
        )
        for name, key in keys.items()
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _table(
    title: str, head: Cells, rows: Sequence[Row], cells: Callable[[Row, dict[str, Any]], Cells]
) -> list[Table]:
    def measured(row: Row, variant: dict[str, Any]) -> Cells:
        return (variant["name"], *(cells(row, variant) if variant["blocks"] else ("did not run",)))

    return [variants_table(title, ("variant", *head), rows, 3, measured)]


def _decompression(rows: Sequence[Row]) -> list[Table]:
    def cells(row: Row, variant: dict[str, Any]) -> Cells:
        unpack, read = variant["shares"]["unpack"], variant["shares"]["read"]
        published = row["published_percent"]
        return (
            *(cell for part in PARTS[:2] for cell in around(unpack[part], _percent)),
            *(around(unpack[part], _percent)[0] for part in PARTS[2:]),
            around(read["step"], _percent)[0],
            *(
                (f"{published['forward']:.2f}", f"{published['backward']:.2f}")
                if published
                else (NOT_PUBLISHED, "")
            ),
        )

    head = (
        "forward %", "low-high", "backward %", "low-high", "head %",
        "step %", "reading: step %", "paper: forward %", "backward %",
    )  # fmt: skip
    title = "Share of time that dequantizing weights takes, in the layers, the head, and the step"
    return _table(title, head, rows, cells)


def _blockwise(rows: Sequence[Row]) -> list[Table]:
    def cells(row: Row, variant: dict[str, Any]) -> Cells:
        layers, head = layers_and_head(variant["blocks"])
        ratio, published = variant["backward_over_forward"], row["published_backward_over_forward"]
        memory = [
            megabytes(max(block[f"{direction}_peak_bytes"] for block in layers))
            for direction in ("forward", "backward")
        ]
        time = [
            seconds(statistics.median([block[f"{direction}_s"] for block in layers]))
            for direction in ("forward", "backward")
        ]
        return (
            *(*memory, megabytes(head["forward_peak_bytes"])),
            *(*time, seconds(head["forward_s"])),
            *(times(ratio["memory"]), times(ratio["time"])),
            *(map(times, published) if published else (NOT_PUBLISHED, "")),
        )

    head = (
        "layer forward MB", "backward MB", "head MB",
        "layer forward s", "backward s", "head s", "backward / forward: MB", "s", "paper: MB", "s",
    )  # fmt: skip
    return _table("Memory and time of a block", head, rows, cells)


def pictures(rows: Sequence[Row]) -> Mapping[str, list[Chart]]:
    """Memory and time of every block, forward and backward, a picture for each row."""
    drawn = {}
    for row in rows:
        measured = {
            variant["name"]: variant["blocks"]
            for variant in row.get("variants", ())
            if variant["blocks"]
        }
        if measured:
            drawn[f"{row['model']}-{row['tokens']}"] = block_charts(measured)
    return drawn


TABLE3 = Benchmark(
    "MeBP's Table 3: the share of time that dequantizing weights takes",
    MEBP_TABLE3,
    MODELS,
    (256,),
    each_case(_row),
    _decompression,
    (
        "forward and backward: of the layers; the head computes loss and gradient in one pass and "
        "has its own column; low-high: the range of the processes",
        PROFILED,
    ),
)
FIGURE2 = Benchmark(
    "MeBP's Figure 2: memory and time of every block, forward and backward",
    MEBP_FIGURE2,
    ("qwen2.5-1.5b",),
    (256,),
    each_case(_row),
    _blockwise,
    (
        "MB: the most memory that MLX's allocator held while the block ran, adapters included, of "
        "the largest layer; seconds and ratios: of the median layer; the head computes loss and "
        "gradient in one pass; the picture also shows the embedding, a lookup of rows",
        PROFILED,
    ),
    pictures,
)
