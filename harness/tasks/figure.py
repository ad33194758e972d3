"""Figures of matplotlib with one look, as PNG bytes.

Colours are Okabe and Ito's, which the colour-blind can tell apart; each line also has its marker.
No window system and no global state of matplotlib is used.
"""

from __future__ import annotations

import io
from typing import Any

from runtime.core.errors import UsageError

try:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    raise UsageError("this picture needs matplotlib: pip install 'ondevice-tune[bench]'") from None

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v")  # no common factor, so that 35 lines have a look of their own


def new_figure(columns: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with a row of axes; `height` is in inches."""
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, index + 1) for index in range(columns)]
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


def style(index: int) -> dict[str, Any]:
    """Colour and marker of line number `index`."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
