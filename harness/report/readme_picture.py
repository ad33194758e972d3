"""The README's picture: peak footprint and seconds of a step, ours beside the usual tools.

`python -m harness.report.readme_picture` draws docs/footprint-and-time.png from the JSON
that `ondevice bench peers` wrote. Every bar is a median over the processes of one benchmark; its
whisker reaches from the least to the greatest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {
    "ours": "ondevice",
    "paper": "MeBP as in its paper\n(our code)",
    "torch-bfloat16": "PyTorch + PEFT,\nbfloat16",
    "mlx-lm-blas": "mlx-lm, float32,\noptimized BLAS",
    "torch-float32": "PyTorch + PEFT,\nfloat32",
}
OURS, OTHERS = "#0072B2", "#9AA5B1"
INK, GRID, PAPER = "#1F2933", "#E1E5EA", "#FFFFFF"  # opaque: the page behind may be dark


def draw(measured: Mapping[str, Any], target: Path) -> None:
    """Write the picture of a `peers` report as a PNG."""
    (row,) = measured["rows"]
    measurements = {variant["name"]: variant for variant in row["variants"]}
    peers = {name: _ranges(measurements[name]) for name in NAMES if name in measurements}
    figure = Figure(figsize=(9.6, 3.9), layout="constrained", facecolor=PAPER)
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, peers, "peak_footprint_bytes", 1e6, "{:,.0f} MB", "Peak footprint of the process")
    _bars(right, peers, "step_s", 1, "{:.2f} s", "Time per training step (median)")
    names = [NAMES[name] for name in peers]
    if "ours" in peers:
        names[list(peers).index("ours")] += f"\n--budget {row['budget']}"
    left.set_yticks(range(len(names)), names)
    left.get_yticklabels()[0].set_fontweight("bold")
    left.invert_yaxis()
    machine = measured["machine"]
    figure.supxlabel(
        f"Qwen2.5 0.5B shapes, {row['tokens']} tokens, batch 1, LoRA rank {row['lora']['rank']} "
        f"on all linear layers, AdamW; {machine['cores']} CPU cores ({machine['cpu']}); less is "
        "better",
        fontsize=8.5,
        color=INK,
    )
    figure.canvas = FigureCanvasAgg(figure)
    figure.savefig(target, format="png", dpi=200, facecolor=PAPER)


def _ranges(variant: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Seconds of all steps, and the peaks of all processes: median, low and high."""
    peaks = [process["peak_footprint_bytes"] for process in variant["processes"]]
    of_peaks = {"median": statistics.median(peaks), "low": min(peaks), "high": max(peaks)}
    return {"step_s": variant["step_s"], "peak_footprint_bytes": of_peaks}


def _bars(
    axes: Axes, peers: Mapping[str, Any], key: str, unit: float, text: str, title: str
) -> None:
    """One bar a peer: the median, with a whisker from the least to the greatest."""
    for position, (name, peer) in enumerate(peers.items()):
        middle, low, high = (peer[key][figure] / unit for figure in ("median", "low", "high"))
        axes.barh(
            position,
            middle,
            height=0.62,
            color=OURS if name == "ours" else OTHERS,
            xerr=[[middle - low], [high - middle]],
            error_kw={"ecolor": INK, "elinewidth": 1.1, "capsize": 2.5},
        )
        axes.annotate(
            text.format(middle),
            (high, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
            fontweight="bold" if name == "ours" else "normal",
            color=INK,
        )
    most = max(peer[key]["high"] for peer in peers.values()) / unit
    axes.set_xlim(0, most * 1.3)
    axes.set_title(title, fontsize=11, color=INK, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(colors=INK, length=0, labelsize=9.5)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    measured = DOCS / "lab" / "bench" / "peers.json"
    parser.add_argument("measured", type=Path, nargs="?", default=measured)
    parser.add_argument("--output", type=Path, default=DOCS / "footprint-and-time.png")
    arguments = parser.parse_args(argv)
    draw(json.loads(arguments.measured.read_text()), arguments.output)


if __name__ == "__main__":
    main()
