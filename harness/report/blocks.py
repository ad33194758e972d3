"""The charts of a profile: memory and time of every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.chart import Chart, Line

DIRECTIONS = ("forward", "backward")


def block_charts(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Memory and time of each block, forward and backward (the MeBP paper's Figure 2).

    measured: by the name of a run, the blocks of its profile; none where it was not profiled.
    """
    # "model.layers.3" is shown as 3; the other blocks have names of their own
    places = [block["name"].rpartition(".")[2] for block in max(measured.values(), key=len)]

    def lines(key: str, scale: float) -> list[Line]:
        return [
            Line(
                f"{name}, {direction}",
                index,
                _points(blocks, f"{direction}_{key}", scale),
                faint=direction == "forward",
            )
            for direction in DIRECTIONS
            for index, (name, blocks) in enumerate(measured.items())
        ]

    look: dict[str, Any] = {"from_zero": True, "across": "block", "places": places}
    return [
        Chart("Most memory allocated in each block", "MB", lines("peak_bytes", 1e-6), **look),
        Chart("Time per step in each block", "s", lines("s", 1.0), **look),
    ]


def _points(
    blocks: Sequence[Mapping[str, Any]], key: str, scale: float
) -> list[tuple[float, float]]:
    """A measurement of every block that has it, by the block's place."""
    values = [(float(place), block.get(key)) for place, block in enumerate(blocks)]
    return [(place, value * scale) for place, value in values if value is not None]
