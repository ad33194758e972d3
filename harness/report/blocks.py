"""The picture of a profile: memory and time of every block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.axes import Axes

from harness.report.figure import Picture, new_figure, png, style


def draw_blocks(measured: Mapping[str, list[dict[str, Any]]], order: list[str]) -> Picture:
    """Memory and time of each block, forward and backward (the MeBP paper's Figure 2).

    measured: by method, the blocks of a run's profile.  order: the methods' lines, for colours.
    """
    figure, (memory, time) = new_figure(2, 1, 6.2)
    # "model.layers.3" is shown as 3; the other blocks have names of their own
    names = [block["name"].rpartition(".")[2] for block in max(measured.values(), key=len)]
    rows: tuple[tuple[Axes, str, Callable[[float], float]], ...] = (
        (memory, "{}_peak_bytes", lambda value: value / 1e6),
        (time, "{}_s", lambda value: value),
    )
    for axes, key, scaled in rows:
        for name, blocks in measured.items():
            look = style(order.index(name))
            for direction, line in (("forward", "-"), ("backward", "--")):
                values = [block.get(key.format(direction)) or 0.0 for block in blocks]
                places = [index for index, value in enumerate(values) if value]
                if places:  # some methods, and some blocks, run forward only
                    axes.plot(
                        places,
                        [scaled(values[index]) for index in places],
                        label=f"{name}, {direction}",
                        linestyle=line,
                        markersize=3.5,
                        linewidth=1.4,
                        **look,
                    )
        places = _ticks(len(names))
        axes.set_xticks(places, [names[place] for place in places])
        axes.set_ylim(bottom=0)
    memory.set_ylabel("most memory allocated (MB)")
    time.set_ylabel("time per step (s)")
    time.set_xlabel("block (numbers are layers)")
    memory.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return "Memory and time of each block", png(figure)


def _ticks(blocks: int) -> list[int]:
    """The blocks with a label: embedding, head, and layers that leave room for these words."""
    first, last = 0, blocks - 1
    every = max(1, -(-blocks // 24))
    room = 2 if blocks > 12 else 1
    layers = range(1, last, every)
    return [first, *(one for one in layers if room <= one <= last - room), last]
