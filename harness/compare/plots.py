"""A comparison's pictures: loss, accuracy, footprint, and blocks, drawn from `compare.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from harness.report.blocks import draw_blocks
from harness.report.figure import (
    GREY,
    Picture,
    colour,
    log_scale,
    new_figure,
    png,
    style,
    thousands,
)

BUDGET_SHOWN = 4  # times the largest peak: a higher line would flatten all others
MARKED = 8  # of a line's points, where each step has one
LOSS_SHOWN = 1.2  # times the loss before training: a run that diverges would flatten all others
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


def _quality(
    report: Mapping[str, Any], methods: Methods, key: str, label: str, factor: float
) -> Picture:
    """A quality against steps or forward passes, on a logarithmic axis, and against seconds."""
    counted = "forward_passes" if report["settings"]["equal"] == "forward-passes" else "step"
    figure, (by_step, by_second) = new_figure(1, 2, 3.9)
    start = factor * report["baseline"][key]
    above = LOSS_SHOWN * start if key == "loss" else math.inf
    for index, (name, one) in enumerate(methods.items()):
        points = one["curve"]["points"]
        values = [factor * point[key] for point in points]
        highest = max(values)
        for axes, against in ((by_step, counted), (by_second, "seconds")):
            places = [point[against] for point in points]
            # a logarithmic axis cannot show step 0; the grey line shows its value
            from_ = 1 if axes is by_step and places[0] == 0 else 0
            axes.plot(
                places[from_:],
                values[from_:],
                label=name if highest <= above else f"{name}, up to {highest:.1f}",
                linewidth=1.6,
                markersize=4,
                **style(index),
            )
    for axes in (by_step, by_second):
        if axes.get_ylim()[1] > above:
            axes.set_ylim(0, above)
        axes.axhline(start, color=GREY, linewidth=1, linestyle=":", label="before training")
        target = report["settings"]["target_loss"]
        if key == "loss" and target:
            axes.axhline(target, color=GREY, linewidth=1, linestyle="--", label="target")
        axes.set_ylabel(label)
    if any(one["curve"]["points"][-1]["step"] for one in methods.values()):
        log_scale(by_step)
    by_second.xaxis.set_major_formatter(thousands)
    by_step.set_xlabel("steps" if counted == "step" else "forward passes")
    by_second.set_xlabel("training time (s)")
    by_second.set_xlim(left=0)
    by_second.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    words = label.partition(" (")[0].capitalize()
    return f"{words} against {by_step.get_xlabel()} and training time", png(figure)


def _footprint(report: Mapping[str, Any], methods: Methods) -> Picture:
    """The footprint after each step against training time; peaks and the budget as lines."""
    figure, (axes,) = new_figure(1, 1, 3.9)
    top = 0.0
    for index, (name, one) in enumerate(methods.items()):
        steps = one["curve"]["steps"]
        seconds = list(accumulate(steps["seconds"]))
        megabytes = [value / 1e6 for value in steps["footprint_bytes"]]
        peak = one["curve"]["peak_bytes"] / 1e6
        top = max(top, peak)
        axes.plot(
            seconds,
            megabytes,
            linewidth=1,
            markersize=4,
            markevery=max(1, len(seconds) // MARKED),
            label=name,
            **style(index),
        )
        axes.axhline(peak, color=colour(index), linewidth=1.2, linestyle=":")
    axes.plot([], [], color=GREY, linewidth=1, label="after each step")
    axes.plot([], [], color=GREY, linewidth=1.2, linestyle=":", label="peak")
    budget = report["budget_bytes"] / 1e6
    shown = not top or budget <= BUDGET_SHOWN * top
    if shown:
        axes.axhline(budget, color="#000000", linewidth=1.2, linestyle="--", label="budget")
    else:
        axes.plot([], [], " ", label=f"budget {budget:,.0f} MB, far above")
    axes.set_ylim(0, 1.08 * (budget if shown else top))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(thousands)
    axes.set_xlabel("training time (s)")
    axes.set_ylabel("footprint of the process (MB)")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return "Footprint over training time", png(figure)
