"""The MeBP paper's Table 3 and Figure 2: where a step's time and memory go, block by block.

Both come from profiled MeBP runs under our plan and the paper's. A profile evaluates between the
parts that it tells apart: it explains a step and does not time one, and it counts the first step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from harness.bench.benchmark import (
    NOT_PUBLISHED,
    Bench,
    Benchmark,
    Row,
    Variant,
    around,
    megabytes,
    seconds,
    times,
)
from harness.bench.published import (
    BACKWARD_OVER_FORWARD,
    DECOMPRESSION,
    MEBP_FIGURE2,
    MEBP_TABLE3,
    MODELS,
)
from harness.measure.repeats import Outcome, Process, figures, in_turn, spread
from harness.report.plots import draw_blocks
from harness.report.report import Table

OWNERS = ("unpack", "read")
PARTS = ("forward", "backward", "head", "step")
Block = dict[str, Any]


def _rows(bench: Bench) -> Iterator[Row]:
    def measured(bundle: Path, model: str, length: int) -> Row:
        def run(variant: Variant) -> Process:
            process, summary = bench.train(bundle, length, variant, profile=True)
            keys = ("blocks", "seconds_per_step")
            return (
                process
                | {"steps": summary["steps"], "seconds": summary["seconds"]}
                | {key: summary[key] for key in keys}
            )

        variants = {one.label: one for one in bench.variants("mebp")}
        bench.note(f"{model} at {length} tokens, profiled")
        outcomes = in_turn(
            {name: partial(run, variant) for name, variant in variants.items()},
            bench.config.repeats,
            bench.note,
        )
        share, backward = (
            DECOMPRESSION.get((model, length)),
            BACKWARD_OVER_FORWARD.get((model, length)),
        )
        return {
            "variants": [
                {"name": name, **asdict(variant), **_figures(outcomes[name])}
                for name, variant in variants.items()
            ],
            "published_percent": None if share is None else asdict(share),
            "published_backward_over_forward": backward,
        }

    return bench.rows(measured)


def _figures(outcome: Outcome) -> dict[str, Any]:
    shares = [_shares(process) for process in outcome.processes]
    blocks = together([process.pop("blocks") for process in outcome.processes])
    return {
        **figures(outcome),
        "shares": {
            owner: {part: spread([one[owner][part] for one in shares]) for part in PARTS}
            for owner in OWNERS
        },
        "blocks": blocks,
        "backward_over_forward": _backward_over_forward(blocks),
    }


def _shares(process: Process) -> dict[str, dict[str, float]]:
    """Of each owner, the share of a pass over the layers, of the head, and of the whole step.

    The head runs forward and backward in one pass over the vocabulary: it has a share of its own.
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
    """The layers, which alone run backward as blocks, and the head; without the embedding."""
    return [one for one in blocks if "backward_s" in one], blocks[-1]


def together(profiles: Sequence[Sequence[Block]]) -> list[Block]:
    """One profile of several processes: median seconds, largest peaks."""
    found: list[Block] = []
    for blocks in zip(*profiles, strict=True):
        one: Block = {"name": blocks[0]["name"]}
        for key in list(blocks[0])[1:]:
            values = [block[key] for block in blocks]
            if key.endswith("_peak_bytes"):
                one[key] = max(values)
            elif key.endswith("_owners_s"):
                owners = dict.fromkeys(owner for value in values for owner in value)
                one[key] = {
                    owner: statistics.median([value.get(owner, 0.0) for value in values])
                    for owner in owners
                }
            else:
                one[key] = statistics.median(values)
        found.append(one)
    return found


def _backward_over_forward(blocks: Sequence[Block]) -> dict[str, float] | None:
    """The median over the layers of their backward's memory and time over their forward's."""
    if not blocks:
        return None
    keys = {"memory": "_peak_bytes", "time": "_s"}
    return {
        name: statistics.median(
            [one[f"backward{key}"] / one[f"forward{key}"] for one in layers_and_head(blocks)[0]]
        )
        for name, key in keys.items()
    }


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _lines(
    rows: Sequence[Row], width: int, cells: Callable[[Row, dict[str, Any]], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for row in rows:
        place = (row["model"], str(row["tokens"]))
        for one in row.get("variants", ()):
            measured = cells(row, one) if one["blocks"] else ("did not run", *[""] * (width - 1))
            found.append((*place, one["name"], *measured))
        if row["failed"]:
            found.append((*place, row["failed"], *[""] * width))
    return found


def _decompression(rows: Sequence[Row]) -> list[Table]:
    def cells(row: Row, one: dict[str, Any]) -> tuple[str, ...]:
        unpack, read = one["shares"]["unpack"], one["shares"]["read"]
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
        "model", "tokens", "plan", "forward %", "low-high", "backward %", "low-high", "head %",
        "step %", "reading: step %", "paper: forward %", "backward %",
    )  # fmt: skip
    title = "Share of time that goes into unpacking weights, in the layers, the head, and the step"
    return [Table(title, [head, *_lines(rows, 9, cells)], 3)]


def _blockwise(rows: Sequence[Row]) -> list[Table]:
    def cells(row: Row, one: dict[str, Any]) -> tuple[str, ...]:
        layers, head = layers_and_head(one["blocks"])
        ratio, published = one["backward_over_forward"], row["published_backward_over_forward"]
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
        "model", "tokens", "plan", "layer forward MB", "backward MB", "head MB",
        "layer forward s", "backward s", "head s", "backward / forward: MB", "s", "paper: MB", "s",
    )  # fmt: skip
    return [Table("Memory and time of a block", [head, *_lines(rows, 10, cells)], 3)]


def pictures(rows: Sequence[Row]) -> Mapping[str, bytes]:
    """Memory and time of every block, forward and backward, a picture for each row."""
    found = {}
    for row in rows:
        measured = {one["name"]: one["blocks"] for one in row.get("variants", ()) if one["blocks"]}
        if measured:
            _, png = draw_blocks(measured, list(measured))
            found[f"{row['model']}-{row['tokens']}"] = png
    return found


TABLE3 = Benchmark(
    "MeBP's Table 3: the share of time that goes into unpacking weights",
    MEBP_TABLE3,
    MODELS,
    (256,),
    _rows,
    _decompression,
    (
        "forward and backward: over the layers; the head computes loss and gradient in one pass, "
        "and its share is told apart; low-high: of processes",
        "of a profile, which counts every step and evaluates between the parts it tells apart",
    ),
)
FIGURE2 = Benchmark(
    "MeBP's Figure 2: memory and time of every block, forward and backward",
    MEBP_FIGURE2,
    ("qwen2.5-1.5b",),
    (256,),
    _rows,
    _blockwise,
    (
        "MB: what MLX's allocator had lent at most while the block ran, adapters and all; the "
        "largest layer's, seconds the median layer's; the head computes loss and gradient in one "
        "pass; the embedding, a lookup of rows, is a block of the picture; ratios are the median "
        "layer's",
        "of a profile, which counts every step and evaluates between the parts it tells apart",
    ),
    pictures,
)
