"""Line charts as inline SVG, whose colours come from the page's style and so follow light and dark.

Nothing here draws on a screen or loads a library: a chart is text. A long line is drawn as means
of equal numbers of neighbouring points, at most `MOST_POINTS` of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 26, 44  # of the plotted area, to the edges
MOST_POINTS = 400
MOST_PLACES = 12  # whose names fit side by side
COLOURS = 6  # that the style of a page has; further lines take them again

Point = tuple[float, float]

STYLE = """
svg.chart { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
svg.chart text { fill: var(--muted); }
svg.chart .grid { stroke: var(--rule); stroke-width: 1; }
svg.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg.chart .faint { stroke-width: 1.1; opacity: 0.55; }
svg.chart .level { stroke-dasharray: 6 4; stroke-width: 1.4; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; margin: 0.2rem 0 0; padding: 0;
          list-style: none; font-size: 0.88rem; }
.legend li { margin: 0; overflow-wrap: anywhere; }
.legend svg.chart { display: inline-block; width: 26px; height: 10px; margin-right: 0.4rem; }
"""


@dataclass(frozen=True)
class Line:
    """A line of a chart: points from left to right.

    colour: its number. marked: whether each point is shown with its value. faint: behind others.
    """

    name: str
    colour: int
    points: Sequence[Point]
    marked: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Level:
    """A dashed line at one height, such as a budget."""

    name: str
    colour: int
    height: float


@dataclass(frozen=True)
class Chart:
    """Lines over steps, or over other things in a row, under a heading.

    from_zero: whether the vertical axis begins at 0 and not at the lowest value.  across: what the
    horizontal axis counts.  places: what stands at 0, 1, 2 and so on, where it does not count; at
    least two.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    from_zero: bool = False
    across: str = "step"
    places: Sequence[str] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no line has a point."""
        return not any(line.points for line in self.lines)

    def html(self) -> str:
        """The chart with its heading and legend."""
        name = escape(self.title)
        return f"<h2>{name}</h2>\n<figure>\n{self._svg(name)}\n{self._legend()}\n</figure>"

    def _svg(self, name: str) -> str:
        points = [point for line in self.lines for point in line.points]
        heights = [y for _, y in points] + [level.height for level in self.levels]
        xs = self._across(points)
        low = 0.0 if self.from_zero else min(heights)
        ys = ticks(low, max(heights), 5)
        area = _Area((xs[0], xs[-1]), (ys[0], ys[-1]))
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        ]
        right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
        for y in ys:
            place = area.y(y)
            parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{right}"/>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{shown(y)}</text>'
            )
        for x in xs:
            place = area.x(x)
            name = escape(self.places[round(x)]) if self.places else shown(x)
            anchor = "end" if self.places and x == xs[-1] else "middle"  # a name may be long
            parts.append(
                f'<text x="{place:.1f}" y="{floor + 18}" text-anchor="{anchor}">{name}</text>'
            )
        across = escape(self.across)
        parts.append(f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{across}</text>')
        parts.append(f'<text x="0" y="12">{escape(self.unit)}</text>')
        for level in self.levels:
            colour = f"stroke:var(--c{level.colour % COLOURS})"
            path = f"M{LEFT} {area.y(level.height):.1f}H{right}"
            parts.append(f'<path class="level" style="{colour}" d="{path}"/>')
        for line in sorted(self.lines, key=lambda line: not line.faint):
            parts += _drawn(line, area, self.across)
        return "\n".join([*parts, "</svg>"])

    def _across(self, points: Sequence[Point]) -> list[float]:
        """The horizontal axis's ticks: round numbers, or places from the first to the last."""
        if not self.places:
            return ticks(min(x for x, _ in points), max(x for x, _ in points), 8)
        last = len(self.places) - 1
        every = math.ceil(last / MOST_PLACES)
        inner = range(0, last - every // 2, every)  # none that runs into the last
        return [float(place) for place in (*inner, last)]

    def _legend(self) -> str:
        items = []
        drawn: list[Line | Level] = [*self.lines, *self.levels]
        for one in drawn:
            if isinstance(one, Line) and not one.points:
                continue
            kind = "level" if isinstance(one, Level) else "line faint" if one.faint else "line"
            colour = f"stroke:var(--c{one.colour % COLOURS})"
            swatch = (
                f'<svg class="chart" viewBox="0 0 26 10" aria-hidden="true">'
                f'<path class="{kind}" style="{colour}" d="M0 5H26"/></svg>'
            )
            items.append(f"<li>{swatch}{escape(one.name)}{_means(one)}</li>")
        return f'<ul class="legend">\n{"".join(items)}\n</ul>'


@dataclass(frozen=True)
class _Area:
    """Where values lie in the plotted area."""

    xs: Point  # the least and the greatest
    ys: Point

    def x(self, value: float) -> float:
        share = (value - self.xs[0]) / (self.xs[1] - self.xs[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.ys[0]) / (self.ys[1] - self.ys[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _drawn(line: Line, area: _Area, across: str) -> list[str]:
    """The elements of one line."""
    if not line.points:
        return []
    colour = f"var(--c{line.colour % COLOURS})"
    places = [(area.x(x), area.y(y)) for x, y in thinned(line.points)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    kind = "line faint" if line.faint else "line"
    found = [f'<path class="{kind}" style="stroke:{colour}" d="{path}"/>']
    if line.marked or len(line.points) == 1:
        found += [
            f'<circle cx="{area.x(x):.1f}" cy="{area.y(y):.1f}" r="3" style="fill:{colour}">'
            f"<title>{escape(line.name)}, {escape(across)} {x:g}: {y:.4g}</title></circle>"
            for x, y in line.points
        ]
    return found


def _means(one: Line | Level) -> str:
    """What a legend says of a line whose neighbouring points are drawn as their means."""
    size = bin_size(len(one.points)) if isinstance(one, Line) else 1
    return f" (means of {size} steps)" if size > 1 else ""


def bin_size(count: int) -> int:
    """How many neighbouring points of `count` are drawn as one."""
    return max(1, math.ceil(count / MOST_POINTS))


def thinned(points: Sequence[Point]) -> list[Point]:
    """The points themselves, or means of neighbours where there are more than can be seen."""
    size = bin_size(len(points))
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in one) / len(one), sum(y for _, y in one) / len(one)) for one in bins]


def ticks(low: float, high: float, most: int) -> list[float]:
    """At least two round numbers at equal distances, which enclose `low` to `high`.

    Their distance is 1, 2, 2.5 or 5 times a power of ten; about `most` of them.
    """
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= most)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def shown(value: float) -> str:
    """A tick's label: 12,000, 0.0025 or 3e-05."""
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"
