"""Line charts as SVG, on a page or in files of their own; their colours follow light and dark.

Nothing here draws on a screen or loads a library: a chart is text. A long line is drawn as means
of equal numbers of neighbouring points, at most `MOST_POINTS` of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from runtime.core.control_characters import in_markup

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 26, 44  # of the plotted area, to the edges
MOST_POINTS = 400
MOST_PLACES = 12  # whose names fit side by side
COLOURS = 6  # further lines take them again
DASHES = ("", "7 3", "2 3")  # of the lines that take a colour first, second and third
CHARACTER = 6.6  # units that a character is wide, at most on average
LETTERS = 24  # units of text on a phone, which shows a unit half as large

Point = tuple[float, float]

# Okabe and Ito's colours, which the colour-blind can tell apart, with enough contrast on each paper
LIGHT = {
    "ink": "#1b1b1b", "paper": "#fff", "muted": "#555", "rule": "#ddd", "c0": "#0072b2",
    "c1": "#d55e00", "c2": "#007a58", "c3": "#b0568a", "c4": "#8a6d00", "c5": "#3d3d3d",
}  # fmt: skip
DARK = {
    "ink": "#e8e8e8", "paper": "#16181b", "muted": "#a8adb3", "rule": "#33373c", "c0": "#56b4e9",
    "c1": "#ff9c4a", "c2": "#3ccf9f", "c3": "#e79bc6", "c4": "#e6c84a", "c5": "#c9c9c9",
}  # fmt: skip


def _paints(colour: Callable[[str], str]) -> str:
    """The rules of style that set colours; `colour` gives the text that stands for each name."""
    lines = ("muted", *(f"c{number}" for number in range(COLOURS)))
    return "\n".join(
        (
            f"svg.chart text {{ fill: {colour('muted')}; }}",
            f"svg.chart .title {{ fill: {colour('ink')}; }}",
            f"svg.chart .paper {{ fill: {colour('paper')}; }}",
            f"svg.chart .grid {{ stroke: {colour('rule')}; }}",
            *(f"svg.chart .{name} {{ stroke: {colour(name)}; }}" for name in lines),
            *(f"svg.chart circle.{name} {{ fill: {colour(name)}; }}" for name in lines),
        )
    )


FORMS = """
svg.chart { font: 12px system-ui, sans-serif; }
svg.chart .title { font-size: 15px; font-weight: 600; }
svg.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg.chart .faint { stroke-width: 1.1; opacity: 0.55; }
svg.chart .level { stroke-dasharray: 6 4; stroke-width: 1.4; fill: none; }
svg.chart .range { stroke-width: 1.1; }
"""
PAGE_STYLE = (
    f"""{FORMS}{_paints(lambda name: f"var(--{name})")}
svg.chart {{ width: 100%; height: auto; display: block; }}
"""
    + f"""
@media (max-width: 40rem) {{
  figure > svg.chart {{ font-size: {LETTERS}px; overflow: visible; margin: 1.4rem 0 1.2rem; }}
  figure > svg.chart .unit {{ transform: translateY(-14px); }}
  figure > svg.chart .count {{ transform: translateY(11px); }}
  figure > svg.chart .across {{ transform: translateY(32px); }}
  figure > svg.chart .between {{ display: none; }}
}}
"""
    + """
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; margin: 0.2rem 0 0; padding: 0;
          list-style: none; font-size: 0.88rem; }
.legend li { margin: 0; overflow-wrap: anywhere; }
.legend svg.chart { display: inline-block; width: 26px; height: 10px; margin-right: 0.4rem; }
"""
)


@dataclass(frozen=True)
class Line:
    """A line of a chart: points from left to right.

    colour: its number.  marked: whether each point is shown with its value.  faint: behind others.
    ranges: the lowest and the highest value of each point, where they are known.
    """

    name: str
    colour: int
    points: Sequence[Point]
    marked: bool = False
    faint: bool = False
    ranges: Sequence[Point] = ()

    @property
    def path(self) -> str:
        """The attributes of its path, but for the path."""
        dashes = DASHES[self.colour // COLOURS % len(DASHES)]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        kind = "line faint" if self.faint else "line"
        return f'class="{kind} c{self.colour % COLOURS}"{dashed}'

    @property
    def label(self) -> str:
        """Its name, and whether neighbouring points are drawn as their means."""
        size = bin_size(len(self.points))
        return f"{self.name} (means of {size} steps)" if size > 1 else self.name


@dataclass(frozen=True)
class Level:
    """A dashed line at one height, such as a budget; grey without a colour's number.

    Without a name it is not in the legend.
    """

    name: str
    colour: int | None
    height: float

    @property
    def path(self) -> str:
        """The attributes of its path, but for the path."""
        return f'class="level {"muted" if self.colour is None else f"c{self.colour % COLOURS}"}"'

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True)
class Chart:
    """Lines over steps, or over other things in a row, under a heading.

    from_zero: whether the vertical axis begins at 0 and not at the lowest value.  across: the
    unit that the horizontal axis counts.  places: the names at 0, 1, 2 and so on, where it does not
    count; at least two.  logarithmic: whether the horizontal axis is; then it leaves out points
    that are not above 0.  ceiling: points above it are drawn at the top.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    from_zero: bool = False
    across: str = "step"
    places: Sequence[str] = ()
    logarithmic: bool = False
    ceiling: float = math.inf

    @property
    def is_empty(self) -> bool:
        """Whether no line has a point."""
        return not any(line.points for line in self.lines)

    def html(self) -> str:
        """The chart with its heading and legend."""
        name = in_markup(self.title)
        picture = (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">\n'
            f"{self.svg()}\n</svg>"
        )
        swatches = (
            f'<li><svg class="chart" viewBox="0 0 26 10" aria-hidden="true">'
            f'<path {path} d="M0 5H26"/></svg>{in_markup(label)}</li>'
            for path, label in self.legend()
        )
        legend = f'<ul class="legend">\n{"".join(swatches)}\n</ul>'
        return f"<h2>{name}</h2>\n<figure>\n{picture}\n{legend}\n</figure>"

    def legend(self) -> list[tuple[str, str]]:
        """Of each line that is drawn, the attributes of its path and its label."""
        drawn: list[Line | Level] = [line for line in self.lines if line.points]
        drawn += self.levels
        return [(item.path, item.label) for item in drawn if item.name]

    def svg(self) -> str:
        """The chart's elements, in an area of `WIDTH` times `HEIGHT`."""
        points = [point for line in self.lines for point in self._shown_points(line)]
        heights = [y for _, y in points] + [level.height for level in self.levels]
        heights += [y for line in self.lines for ends in line.ranges for y in ends]
        xs = self._across([x for x, _ in points])
        low = 0.0 if self.from_zero else min(heights)
        ys = ticks(low, min(max(heights), self.ceiling), 5)
        area = _Area((xs[0], xs[-1]), (ys[0], ys[-1]), self.logarithmic)
        right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = []
        for y in ys:
            place = area.y(y)
            parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{right}"/>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{shown(y)}</text>'
            )
        names = {x: self.places[round(x)] if self.places else shown(x) for x in xs}
        apart = _apart([(area.x(x), name) for x, name in names.items()])
        for x, text in names.items():
            place = area.x(x)
            kind = "count" if place in apart else "count between"
            name = in_markup(text)
            anchor = "end" if self.places and x == xs[-1] else "middle"  # a name may be long
            parts.append(
                f'<text class="{kind}" x="{place:.1f}" y="{floor + 18}" text-anchor="{anchor}">'
                f"{name}</text>"
            )
        across = in_markup(self.across)
        parts.append(
            f'<text class="across" x="{right}" y="{HEIGHT - 6}" text-anchor="end">{across}</text>'
        )
        parts.append(f'<text class="unit" x="0" y="12">{in_markup(self.unit)}</text>')
        for level in self.levels:
            parts.append(f'<path {level.path} d="M{LEFT} {area.y(level.height):.1f}H{right}"/>')
        for line in sorted(self.lines, key=lambda line: not line.faint):
            parts += _drawn(line, self._shown_points(line), area, self.across)
        return "\n".join(parts)

    def _shown_points(self, line: Line) -> Sequence[Point]:
        if not self.logarithmic:
            return line.points
        return [(x, y) for x, y in line.points if x > 0]

    def _across(self, xs: Sequence[float]) -> list[float]:
        """The horizontal axis's ticks: round numbers, or places from the first to the last."""
        if self.logarithmic:
            return log_ticks(min(xs), max(xs))
        if not self.places:
            return ticks(min(xs), max(xs), 8)
        last = len(self.places) - 1
        every = math.ceil(last / MOST_PLACES)
        inner = range(0, last - every // 2, every)  # none that runs into the last
        return [float(place) for place in (*inner, last)]


def standalone(charts: Sequence[Chart]) -> bytes:
    """Charts below each other, above one legend of all, as an SVG file.

    Browsers show it in the reader's choice of light or dark, and so do pages that embed it as an
    image; other programs show it in light.
    """
    heading, row, swatch, gap = 26, 20, 26, 18
    names = dict.fromkeys(entry for chart in charts for entry in chart.legend())
    entries, x, y = [], 0.0, len(charts) * (heading + HEIGHT + gap)
    for path, label in names:
        width = swatch + 6 + CHARACTER * len(label)
        if x and x + width > WIDTH:
            x, y = 0.0, y + row
        entries.append(
            f'<g transform="translate({x:.1f} {y})"><path {path} d="M0 5H{swatch}"/>'
            f'<text x="{swatch + 6}" y="9">{in_markup(label)}</text></g>'
        )
        x += width + gap
    below = accumulate((heading + HEIGHT + gap for _ in charts[1:]), initial=0)
    drawn = (
        f'<g transform="translate(0 {top})">\n<text class="title" x="0" y="14">'
        f'{in_markup(chart.title)}</text>\n<g transform="translate(0 {heading})">\n{chart.svg()}\n'
        "</g></g>"
        for chart, top in zip(charts, below, strict=True)
    )
    edge, height = 12, y + row
    box = f"{-edge} {-edge} {WIDTH + 2 * edge} {height + 2 * edge}"
    dark = f"@media (prefers-color-scheme: dark) {{\n{_paints(DARK.__getitem__)}\n}}"
    return "\n".join(
        (
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="{box}" '
            f'width="{WIDTH + 2 * edge}" height="{height + 2 * edge}" role="img">',
            f"<title>{in_markup('; '.join(chart.title for chart in charts))}</title>",
            f"<style>{FORMS}{_paints(LIGHT.__getitem__)}\n{dark}</style>",
            f'<rect class="paper" x="{-edge}" y="{-edge}" width="100%" height="100%"/>',
            *drawn,
            *entries,
            "</svg>\n",
        )
    ).encode()


def _apart(labels: Sequence[tuple[float, str]]) -> set[float]:
    """The places of labels that do not run into each other on a phone, from the last one on."""
    kept: set[float] = set()
    free = math.inf
    for place, text in reversed(labels):
        half = CHARACTER * LETTERS / 12 * (len(text) + 1) / 2  # a gap of a character between two
        if place + half <= free:
            kept.add(place)
            free = place - half
    return kept


@dataclass(frozen=True)
class _Area:
    """Where values lie in the plotted area; those beyond its top lie at the top."""

    xs: Point  # the least and the greatest
    ys: Point
    logarithmic: bool

    def x(self, value: float) -> float:
        low, high, at = map(math.log, (*self.xs, value)) if self.logarithmic else (*self.xs, value)
        return LEFT + (at - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (min(value, self.ys[1]) - self.ys[0]) / (self.ys[1] - self.ys[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _drawn(line: Line, points: Sequence[Point], area: _Area, across: str) -> list[str]:
    if not points:
        return []
    colour = f"c{line.colour % COLOURS}"
    corners = "L".join(f"{area.x(x):.1f} {area.y(y):.1f}" for x, y in thinned(points))
    parts = [f'<path {line.path} d="M{corners}"/>']
    parts += [
        f'<path class="range {colour}" d="M{area.x(x):.1f} {area.y(low):.1f}V{area.y(high):.1f}"/>'
        for (x, _), (low, high) in zip(line.points, line.ranges, strict=False)
    ]
    if line.marked or len(points) == 1:
        parts += [
            f'<circle class="{colour}" cx="{area.x(x):.1f}" cy="{area.y(y):.1f}" r="3">'
            f"<title>{in_markup(line.name)}, {in_markup(across)} {x:g}: {y:.4g}</title></circle>"
            for x, y in points
        ]
    return parts


def bin_size(count: int) -> int:
    """How many neighbouring points of `count` are drawn as one."""
    return max(1, math.ceil(count / MOST_POINTS))


def thinned(points: Sequence[Point]) -> list[Point]:
    """The points themselves, or means of neighbours where there are more than can be seen."""
    size = bin_size(len(points))
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in bins
    ]


def ticks(low: float, high: float, most: int) -> list[float]:
    """At least two round numbers at equal distances, which enclose `low` to `high`.

    Their distance is 1, 2, 2.5 or 5 times a power of ten; about `most` of them.
    """
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= most)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """At least two numbers of 1, 2 and 5 times powers of ten, which enclose `low` to `high`.

    Over many powers of ten they are powers of ten alone.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 5 else (1,)
    marks = [factor * 10.0**power for power in range(first, last + 2) for factor in factors]
    begin = max(index for index, mark in enumerate(marks) if mark <= low)
    end = next(index for index, mark in enumerate(marks) if mark >= high)
    return marks[begin : max(end, begin + 1) + 1]


def shown(value: float) -> str:
    """A tick's label: 12,000, 0.0025 or 3e-05."""
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"
