"""Figures of matplotlib with one look, as PNG bytes.

Colours are Okabe and Ito's, which the colour-blind can tell apart; each line also has its marker.
No window system and no global state of matplotlib is used.
"""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v")  # no common factor, so that 35 lines have a look of their own
GREY = "#666666"
Picture = tuple[str, bytes]  # a caption and PNG bytes


def new_figure(rows: int, columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of axes; `height` is in inches."""
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e4e4e4", linewidth=0.8)
        one.set_axisbelow(True)
    return figure, axes


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.canvas = FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def colour(index: int) -> str:
    """The colour of line number `index`."""
    return COLOURS[index % len(COLOURS)]


def style(index: int) -> dict[str, Any]:
    """Colour and marker of line number `index`."""
    return {"color": colour(index), "marker": MARKERS[index % len(MARKERS)]}


def thousands(value: float, _: object) -> str:
    """A tick's label: 12,000."""
    return f"{value:,g}"


def log_scale(axes: Axes) -> None:
    """Make the horizontal axis logarithmic, with labels at 1, 2 and 5 times powers of ten."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(thousands)
    axes.xaxis.set_minor_formatter(NullFormatter())
