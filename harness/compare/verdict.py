"""A comparison's result in a few sentences: which method was first at each level, at what cost.

It uses the levels alone, so it says nothing that the table below it does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Level = Mapping[str, Any]
Reached = Mapping[str, Mapping[str, Any] | None]


def verdict(levels: Sequence[Level]) -> str:
    """Sentences about `levels` of `compare.json`, from high losses to low ones."""
    if not levels:
        return "No method fell below the loss before training."
    names = list(levels[0]["reached"])
    if len(names) == 1:
        return _alone(names[0], levels)
    reached = [level for level in levels if any(level["reached"].values())]
    shared = [level for level in levels if all(level["reached"].values())]
    said = [_winners(names, reached)] if reached else []
    if shared:
        said.append(_cost(shared[-1]))
    if reached and reached[-1] not in shared:
        said.append(_further(reached[-1], bool(shared)))
    if levels[-1] not in reached:
        said.append(f"No method reached {_called(levels[-1])}.")
    return " ".join(said)


def _alone(name: str, levels: Sequence[Level]) -> str:
    reached = [level for level in levels if level["reached"][name]]
    said = [f"{name} came to {_called(at)}: {_cost_at(at, name)}." for at in reached[-1:]]
    if levels[-1] not in reached:
        said.append(f"It did not reach {_called(levels[-1])}.")
    return " ".join(said)


def _winners(names: Sequence[str], levels: Sequence[Level]) -> str:
    first = [_ordered(level["reached"])[0] for level in levels]
    counts = {name: first.count(name) for name in names if name in first}
    if len(counts) == 1:
        return f"{first[0]} was first at every level."
    (most, count), *others = sorted(counts.items(), key=lambda item: -item[1])
    rest = "".join(f", {name} at {n}" for name, n in others)
    return f"{most} was first at {count} of {len(first)} levels{rest}."


def _cost(level: Level) -> str:
    reached: Reached = level["reached"]
    quick, *others = _ordered(reached)
    said = f"The lowest level that all reached, {_called(level)}, took {quick} "
    said += _cost_at(level, quick)
    for name in others:
        said += f"; {name} {_cost_at(level, name)}"
        if _seconds(reached, quick) > 0:  # the loss before training costs nothing
            more = _seconds(reached, name) / _seconds(reached, quick)
            said += f", {more:.{1 if more < 10 else 0}f} times as long"
    return f"{said}."


def _further(level: Level, shared: bool) -> str:
    names = _ordered(level["reached"])
    costs = "; ".join(_cost_at(level, name) for name in names)
    went = "went on, to" if shared else "came to"
    return f"Only {' and '.join(names)} {went} {_called(level)}: {costs}."


def _cost_at(level: Level, name: str) -> str:
    point = level["reached"][name]
    return f"{point['seconds']:,.1f} s and {point['peak_bytes'] / 1e6:.1f} MB"


def _ordered(reached: Reached) -> list[str]:
    """The methods that reached a level, the quickest first."""
    return sorted((name for name, at in reached.items() if at), key=lambda n: _seconds(reached, n))


def _seconds(reached: Reached, name: str) -> float:
    point = reached[name]
    assert point is not None
    return float(point["seconds"])


def _called(level: Level) -> str:
    return f"a loss of {level['loss']:.4f} ({level['meaning']})"
