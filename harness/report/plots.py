"""A comparison's pictures, as PNG bytes drawn from `compare.json`.

Colours are Okabe and Ito's, which stay apart for the colour-blind; each method also has its marker.
No window system and no global state of matplotlib is used.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
MARKERS = ("o", "s", "^", "D")
GREY = "#666666"
BUDGET_SHOWN = 4  # times the largest peak: a line further up would flatten all else
Picture = tuple[str, bytes]  # a caption and PNG bytes
Methods = Mapping[str, Mapping[str, Any]]


def draw(report: Mapping[str, Any]) -> dict[str, Picture]:
    """Captions and PNGs by file name: loss, accuracy, footprint, and blocks where measured."""
    methods = {name: one for name, one in report["methods"].items() if one["curve"]}
    found = {
        "loss.png": _quality(report, methods, "loss", "held-out loss (nats per token)", 1),
        "accuracy.png": _quality(report, methods, "accuracy", "next-token accuracy (%)", 100),
        "footprint.png": _footprint(report, methods),
    }
    measured = {name: one["profile"]["blocks"] for name, one in methods.items() if one["profile"]}
    if measured:
        found["blocks.png"] = draw_blocks(measured, list(methods))
    return found


def _figure(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e4e4e4", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, axes


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.canvas = FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _thousands(value: float, _: object) -> str:
    return f"{value:,g}"


def _style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def _quality(
    report: Mapping[str, Any], methods: Methods, key: str, label: str, factor: float
) -> Picture:
    """A quality against steps, on a logarithmic axis, and against training seconds."""
    figure, (by_step, by_second) = _figure(1, 2, 3.9)
    for index, (name, one) in enumerate(methods.items()):
        points = one["curve"]["points"]
        values = [factor * point[key] for point in points]
        for axes, against in ((by_step, "step"), (by_second, "seconds")):
            places = [point[against] for point in points]
            # a logarithmic axis has no place for step 0, which the grey line stands for
            from_ = 1 if axes is by_step and places[0] == 0 else 0
            axes.plot(
                places[from_:],
                values[from_:],
                label=name,
                linewidth=1.6,
                markersize=4,
                **_style(index),
            )
    for axes in (by_step, by_second):
        start = factor * report["baseline"][key]
        axes.axhline(start, color=GREY, linewidth=1, linestyle=":", label="before training")
        target = report["settings"]["target_loss"]
        if key == "loss" and target:
            axes.axhline(target, color=GREY, linewidth=1, linestyle="--", label="target")
        axes.set_ylabel(label)
    if any(one["curve"]["points"][-1]["step"] for one in methods.values()):
        _log_scale(by_step)
    by_second.xaxis.set_major_formatter(_thousands)
    by_step.set_xlabel("steps")
    by_second.set_xlabel("training time (s)")
    by_second.set_xlim(left=0)
    by_second.legend(frameon=False)
    words = label.partition(" (")[0]
    return f"{words.capitalize()} against steps and training time", _png(figure)


def _log_scale(axes: Axes) -> None:
    """Logarithmic from left to right, labelled at 1, 2 and 5 times the powers of ten."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(_thousands)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _footprint(report: Mapping[str, Any], methods: Methods) -> Picture:
    """The footprint after each step against training time; peaks and the budget as lines."""
    figure, (axes,) = _figure(1, 1, 3.9)
    top = 0.0
    for index, (name, one) in enumerate(methods.items()):
        steps = one["curve"]["steps"]
        seconds = list(accumulate(steps["seconds"]))
        colour = COLOURS[index % len(COLOURS)]
        megabytes = [value / 1e6 for value in steps["footprint_bytes"]]
        peak = one["curve"]["peak_bytes"] / 1e6
        top = max(top, peak)
        axes.plot(seconds, megabytes, color=colour, linewidth=1, label=f"{name}, after each step")
        axes.axhline(peak, color=colour, linewidth=1.2, linestyle=":", label=f"{name}, peak")
    budget = report["budget_bytes"] / 1e6
    shown = not top or budget <= BUDGET_SHOWN * top
    if shown:
        axes.axhline(budget, color="#000000", linewidth=1.2, linestyle="--", label="budget")
    else:
        axes.plot([], [], " ", label=f"budget {budget:,.0f} MB, far above")
    axes.set_ylim(0, 1.08 * (budget if shown else top))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(_thousands)
    axes.set_xlabel("training time (s)")
    axes.set_ylabel("footprint of the process (MB)")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return "Footprint over training time", _png(figure)


def draw_blocks(measured: Mapping[str, list[dict[str, Any]]], order: list[str]) -> Picture:
    """Memory and time of each block, forward and backward (the MeBP paper's Figure 2)."""
    figure, (memory, time) = _figure(2, 1, 6.2)
    # of "model.layers.3" the 3: the others have a block each of their own name
    names = [block["name"].rpartition(".")[2] for block in max(measured.values(), key=len)]
    rows: tuple[tuple[Axes, str, Callable[[float], float]], ...] = (
        (memory, "{}_peak_bytes", lambda value: value / 1e6),
        (time, "{}_s", lambda value: value),
    )
    for axes, key, scaled in rows:
        for name, blocks in measured.items():
            style = _style(order.index(name))
            for direction, line in (("forward", "-"), ("backward", "--")):
                values = [block.get(key.format(direction)) or 0.0 for block in blocks]
                places = [index for index, value in enumerate(values) if value]
                if places:  # mezo has no backward, and not every block has one
                    axes.plot(
                        places,
                        [scaled(values[index]) for index in places],
                        label=f"{name}, {direction}",
                        linestyle=line,
                        markersize=3.5,
                        linewidth=1.4,
                        **style,
                    )
        every = max(1, -(-len(names) // 24))
        places = [0, *range(1, len(names) - 1, every), len(names) - 1]
        axes.set_xticks(places, [names[place] for place in places])
        axes.set_ylim(bottom=0)
    memory.set_ylabel("allocated at most (MB)")
    time.set_ylabel("time per step (s)")
    time.set_xlabel("block (numbers are layers)")
    memory.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return "Memory and time of each block", _png(figure)


def draw_budgets(curves: Mapping[str, list[dict[str, float]]]) -> Picture:
    """Seconds of a step against the budget: medians, with bars from the least to the most.

    curves: by method; points with `megabytes`, `median`, `low` and `high` (seconds).
    """
    figure, (axes,) = _figure(1, 1, 3.9)
    for index, (name, points) in enumerate(curves.items()):
        rising = sorted(points, key=lambda point: point["megabytes"])
        places, values = ([point[key] for point in rising] for key in ("megabytes", "median"))
        bars = [
            [point["median"] - point["low"] for point in rising],
            [point["high"] - point["median"] for point in rising],
        ]
        axes.errorbar(places, values, bars, label=name, linewidth=1.6, capsize=3, **_style(index))
    _log_scale(axes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget (MB)")
    axes.set_ylabel("time per step (s)")
    axes.legend(frameon=False)
    return "Seconds of a step against the budget", _png(figure)
