"""A comparison's charts: loss, accuracy and footprint, drawn from `compare.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from harness.report.chart import Chart, Level, Line

BUDGET_SHOWN = 4  # times the largest peak: a higher line would flatten all others
LOSS_SHOWN = 1.2  # times the loss before training: a run that diverges would flatten all others
Methods = Mapping[str, Mapping[str, Any]]


def draw(report: Mapping[str, Any]) -> dict[str, list[Chart]]:
    """The charts of each picture: loss, accuracy and footprint, where measured."""
    methods = {name: method for name, method in report["methods"].items() if method["curve"]}
    pictures = {
        "loss": _quality(report, methods, "loss", "nats per token", 1),
        "accuracy": _quality(report, methods, "accuracy", "%", 100),
        "footprint": [_footprint(report, methods)],
    }
    shown = {
        name: [chart for chart in charts if not chart.is_empty] for name, charts in pictures.items()
    }
    return {name: charts for name, charts in shown.items() if charts}


def _quality(
    report: Mapping[str, Any], methods: Methods, key: str, unit: str, factor: float
) -> list[Chart]:
    """A quality against steps or forward passes, on a logarithmic axis, and against seconds."""
    settings = report["settings"]
    start = factor * report["baseline"][key]
    levels = [Level("before training", None, start)]
    if key == "loss" and settings["target_loss"]:
        levels.append(Level("target", 0, settings["target_loss"]))
    ceiling = LOSS_SHOWN * start if key == "loss" else math.inf
    counted = "forward_passes" if settings["equal"] == "forward-passes" else "step"

    def chart(against: str, across: str, logarithmic: bool) -> Chart:
        lines = []
        for index, (name, method) in enumerate(methods.items()):
            points = [(point[against], factor * point[key]) for point in method["curve"]["points"]]
            highest = max(value for _, value in points)
            label = name if highest <= ceiling else f"{name}, up to {highest:.1f}"
            lines.append(Line(label, index, points, marked=True))
        label = {"loss": "Held-out loss", "accuracy": "Next-token accuracy"}[key]
        return Chart(
            f"{label} against {across.partition(' (')[0]}",
            unit,
            lines,
            levels,
            across=across,
            logarithmic=logarithmic,
            ceiling=ceiling,
        )

    # a logarithmic axis cannot show step 0; the grey level shows its value
    trained = any(method["curve"]["points"][-1][counted] for method in methods.values())
    return [
        chart(counted, "steps" if counted == "step" else "forward passes", trained),
        chart("seconds", "training time (s)", False),
    ]


def _footprint(report: Mapping[str, Any], methods: Methods) -> Chart:
    """The footprint after each step against training time; peaks and the budget as levels."""
    lines, levels, top = [], [], 0.0
    for index, (name, method) in enumerate(methods.items()):
        steps, peak = method["curve"]["steps"], method["curve"]["peak_bytes"] / 1e6
        megabytes = [value / 1e6 for value in steps["footprint_bytes"]]
        points = list(zip(accumulate(steps["seconds"]), megabytes, strict=True))
        lines.append(Line(f"{name}, peak {peak:,.0f} MB", index, points))
        levels.append(Level("", index, peak))
        top = max(top, peak)
    budget = report["budget_bytes"] / 1e6
    title = "Footprint of the process after each step, and its peak (dashed)"
    if not top or budget <= BUDGET_SHOWN * top:
        levels.append(Level("budget", None, budget))
    else:
        title += f"; the budget, {budget:,.0f} MB, is far above"
    return Chart(title, "MB", lines, levels, from_zero=True, across="training time (s)")
