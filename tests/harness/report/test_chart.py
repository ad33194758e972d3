"""Charts as SVG: ticks, places of points, means of long lines, and text that is only text."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from support.lengths import at_length

from harness.report.chart import (
    BOTTOM,
    DARK,
    HEIGHT,
    LEFT,
    LIGHT,
    MOST_PLACES,
    MOST_POINTS,
    PAGE_STYLE,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Level,
    Line,
    bin_size,
    log_ticks,
    shown,
    standalone,
    thinned,
    ticks,
)
from runtime.config.methods import METHODS

Rng = np.random.Generator


def drawn(chart: Chart) -> list[ElementTree.Element]:
    """The elements of the chart's figure; the first <svg> is the chart, others are legends."""
    _, figure = chart.html().split("\n", 1)
    return list(ElementTree.fromstring(figure).iter())


def path_of(chart: Chart, kind: str) -> list[tuple[float, float]]:
    """The corners of the first path of a kind."""
    paths = [one.get("d", "") for one in drawn(chart) if kind in one.get("class", "").split()]
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", paths[0])]


@at_length("draws", 200, 5000)
def test_ticks_are_round_and_enclose_the_values(rng: Rng, draws: int) -> None:
    for _ in range(draws):
        low = float(rng.normal() * 10.0 ** rng.integers(-6, 7))
        high = low + float(abs(rng.normal()) * 10.0 ** rng.integers(-3, 7))
        most = int(rng.integers(3, 10))
        found = ticks(low, high, most)
        step = found[1] - found[0]
        slack = 1e-6 * step
        assert found[0] <= low + slack and high <= found[-1] + slack
        assert 2 <= len(found) <= most + 2
        assert np.allclose(np.diff(found), step)
        leading = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(leading - one) for one in (1, 2, 2.5, 5, 10)) < 1e-3


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_one_value_alone_has_an_axis_too(value: float) -> None:
    found = ticks(value, value, 5)
    assert len(found) >= 2 and found[0] <= value <= found[-1]


def test_points_lie_where_the_axes_say() -> None:
    chart = Chart("Loss", "nats", [Line("a", 0, [(0, 10), (50, 0), (100, 5)])])
    corners = path_of(chart, "line")
    assert corners[0] == (LEFT, TOP)
    assert corners[1] == ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM)
    assert corners[2] == (WIDTH - RIGHT, pytest.approx((TOP + HEIGHT - BOTTOM) / 2))
    from_zero = Chart("Loss", "nats", [Line("a", 0, [(0, 10), (100, 5)])], from_zero=True)
    assert path_of(from_zero, "line")[1][1] == pytest.approx((TOP + HEIGHT - BOTTOM) / 2)


@pytest.mark.parametrize("count", [2, 3, 13, 14, 28, 64])
def test_places_have_their_names(count: int) -> None:
    names = [f"<{at}>" for at in range(count)]
    chart = Chart("x", "s", [Line("a", 0, [(0, 1)])], across="block", places=names)
    texts = [one.text for one in drawn(chart) if one.tag.endswith("text")]
    found = [text for text in texts if text in names]
    assert found[0] == names[0] and found[-1] == names[-1]
    assert len(found) <= MOST_PLACES + 1 and "block" in texts and "step" not in texts


def test_a_level_is_inside_the_axes(rng: Rng) -> None:
    height = float(rng.uniform(50, 500))
    chart = Chart("x", "MB", [Line("a", 0, [(1, 1), (2, 3)])], [Level("budget", 0, height)])
    (level, _) = [one for one in drawn(chart) if "level" in one.get("class", "").split()]
    found = re.match(rf"M{LEFT} ([\d.]+)H", level.get("d", ""))
    assert found is not None and TOP <= float(found[1]) <= HEIGHT - BOTTOM


def test_long_lines_are_means_and_say_so(rng: Rng) -> None:
    count = int(rng.integers(MOST_POINTS + 1, 20 * MOST_POINTS))
    points = [(float(i), float(y)) for i, y in enumerate(rng.normal(size=count), 1)]
    size = bin_size(count)
    found = thinned(points)
    assert MOST_POINTS / 2 <= len(found) <= MOST_POINTS
    for place, (x, y) in enumerate(found):
        some = points[place * size : (place + 1) * size]
        assert x == pytest.approx(np.mean([one[0] for one in some]))
        assert y == pytest.approx(np.mean([one[1] for one in some]))
    text = Chart("x", "s", [Line("a", 0, points)]).html()
    assert f"a (means of {size} steps)" in text
    short = points[:MOST_POINTS]
    assert thinned(short) == short and bin_size(len(short)) == 1
    assert "means of" not in Chart("x", "s", [Line("a", 0, short)]).html()


def test_a_logarithmic_axis_has_equal_factors_at_equal_distances(rng: Rng) -> None:
    low = float(10 ** rng.uniform(-3, 4))
    points = [(0.0, 9.0), *((low * 3**power, 1.0) for power in range(4))]
    chart = Chart("x", "s", [Line("a", 0, points)], logarithmic=True)
    corners = path_of(chart, "line")
    assert len(corners) == 4  # not what stands at 0
    assert np.ptp(np.diff([x for x, _ in corners])) < 0.3
    assert corners[0][0] >= LEFT and corners[-1][0] <= WIDTH - RIGHT


@at_length("draws", 200, 5000)
def test_logarithmic_ticks_enclose_the_values(rng: Rng, draws: int) -> None:
    for _ in range(draws):
        low = float(10 ** rng.uniform(-6, 6))
        high = low * float(10 ** rng.choice([0.0, rng.uniform(0, 6)]))
        found = log_ticks(low, high)
        assert found[0] <= low and high <= found[-1] and 2 <= len(found) <= 20
        assert all(b / a > 1.9 for a, b in pairwise(found))
        assert all(f"{one:.0e}"[0] in "125" for one in found)


def test_what_lies_above_the_ceiling_is_drawn_at_the_top() -> None:
    chart = Chart("x", "s", [Line("a", 0, [(0, 0), (1, 10), (2, 1e9)])], ceiling=10)
    assert [y for _, y in path_of(chart, "line")] == [HEIGHT - BOTTOM, TOP, TOP]


def test_every_method_has_a_look_of_its_own() -> None:
    assert len({Line("", index, []).path for index in range(len(METHODS))}) == len(METHODS)


def test_a_file_has_its_charts_one_legend_and_both_schemes() -> None:
    names = [f"<run> & {'long ' * 9}{number}" for number in range(4)]
    lines = [Line(name, index, [(1, 2), (2, 3)]) for index, name in enumerate(names)]
    levels = [Level("budget", 1, 2.5), Level("", 0, 2.0)]
    text = standalone([Chart("first", "s", lines, levels), Chart("second", "MB", lines, levels)])
    root = ElementTree.fromstring(text)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    texts = [one.text for one in root.iter() if one.tag.endswith("}text")]
    assert [texts.count(name) for name in (*names, "budget", "first", "second")] == [1] * 7
    legend = [one.get("transform", "") for one in root if one.tag.endswith("}g")][2:]
    places = [tuple(map(float, re.findall(r"[\d.]+", one))) for one in legend]
    assert len(set(places)) == 5 and all(x < width and y < height for x, y in places)
    style = next(one.text or "" for one in root if one.tag.endswith("}style"))
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for colours, rules in ((LIGHT, light), (DARK, dark)):
        assert all(f" {colours[name]};" in rules for name in colours)
    assert b"var(" not in text and b"http" not in text.replace(b"http://www.w3.org/2000/svg", b"")


def test_text_is_only_text() -> None:
    name = "<script>alert('x')</script> & \"y\""
    lines = [Line(name, 0, [(1, 2), (2, 3)], marked=True)]
    found = drawn(Chart(name, name, lines, [Level(name, 1, 2.0)]))
    assert not any(one.tag == "script" for one in found)
    assert sum(name in (one.text or "") or name in (one.tail or "") for one in found) >= 4


def test_a_chart_without_points_is_empty() -> None:
    assert Chart("x", "s", [Line("a", 0, [])], [Level("budget", 0, 1.0)]).is_empty
    alone = Chart("x", "s", [Line("a", 0, [(3, 2)]), Line("b", 1, [])])
    assert not alone.is_empty and "<circle" in alone.html() and "b</li>" not in alone.html()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12000, "12,000"), (2.5, "2.5"), (3e-5, "3e-05"), (0.0025, "0.0025"),
     (2e7, "2e+07"), (-0.25, "-0.25")],
)  # fmt: skip
def test_labels_of_ticks(value: float, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize("last", [3, 99, 1_200, 12_345, 99_999, 400_000])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_labels_can_be_read_on_a_phone(last: int, logarithmic: bool) -> None:
    """A page of 390 points leaves a chart 358, in which they neither shrink nor run together."""
    rule = re.search(r"@media \(max-width: 40rem\).*?font-size: (\d+)px", PAGE_STYLE, re.DOTALL)
    assert rule is not None
    letters = float(rule[1])
    assert letters * (390 - 2 * 16) / WIDTH >= 11
    chart = Chart("Loss", "nats", [Line("a", 0, [(1, 1), (last, 2)])], logarithmic=logarithmic)
    labels = [
        (float(one.get("x", "")), one.text or "")
        for one in drawn(chart)
        if one.get("class") == "count"
    ]
    assert len(labels) >= 2
    for (left, text), (right, other) in pairwise(labels):
        assert right - left > 0.55 * letters * (len(text) + len(other)) / 2  # wide as digits are
