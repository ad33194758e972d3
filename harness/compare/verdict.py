"""A comparison's result in a few sentences: which method was first at each level, at what cost.

It uses the levels alone, so it says nothing that the table below it does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Reached = Mapping[str, Mapping[str, Any] | None]


def verdict(levels: Sequence[Mapping[str, Any]], judged_by: str = "seconds") -> str:
    """Sentences about `levels` of `compare.json`, from high losses to low ones.

    judged_by: `seconds` or `forward_passes`, the cost by which a method is first.
    """
    if not levels:
        return "No method fell below the loss before training."
    judge = JUDGES[judged_by]
    names = list(levels[0]["reached"])
    if len(names) == 1:
        return judge.alone(names[0], levels)
    reached = [level for level in levels if any(level["reached"].values())]
    shared = [level for level in levels if all(level["reached"].values())]
    said = [judge.winners(names, reached)] if reached else []
    if shared:
        said.append(judge.cost(shared[-1]))
    if reached and reached[-1] not in shared:
        said.append(judge.further(reached[-1], bool(shared)))
    if levels[-1] not in reached:
        said.append(f"No method reached {_called(levels[-1])}.")
    return " ".join(said)


@dataclass(frozen=True)
class Judge:
    """The cost `key` of a point in words: `shown` formats it, `more` compares two."""

    key: str
    shown: str
    more: str

    def alone(self, name: str, levels: Sequence[Mapping[str, Any]]) -> str:
        reached = [level for level in levels if level["reached"][name]]
        said = [f"{name} came to {_called(at)}: {self.cost_at(at, name)}." for at in reached[-1:]]
        if levels[-1] not in reached:
            said.append(f"It did not reach {_called(levels[-1])}.")
        return " ".join(said)

    def winners(self, names: Sequence[str], levels: Sequence[Mapping[str, Any]]) -> str:
        first = [self.ordered(level["reached"])[0] for level in levels]
        counts = {name: first.count(name) for name in names if name in first}
        if len(counts) == 1:
            return f"{first[0]} was first at every level."
        (most, count), *others = sorted(counts.items(), key=lambda item: -item[1])
        rest = "".join(f", {name} at {n}" for name, n in others)
        return f"{most} was first at {count} of {len(first)} levels{rest}."

    def cost(self, level: Mapping[str, Any]) -> str:
        reached: Reached = level["reached"]
        quick, *others = self.ordered(reached)
        said = f"The lowest level that all reached, {_called(level)}, took {quick} "
        said += self.cost_at(level, quick)
        for name in others:
            said += f"; {name} {self.cost_at(level, name)}"
            if self.of(reached, quick) > 0:  # the loss before training costs nothing
                more = self.of(reached, name) / self.of(reached, quick)
                said += f", {more:.{1 if more < 10 else 0}f} times as {self.more}"
        return f"{said}."

    def further(self, level: Mapping[str, Any], shared: bool) -> str:
        names = self.ordered(level["reached"])
        costs = "; ".join(self.cost_at(level, name) for name in names)
        went = "went on, to" if shared else "came to"
        return f"Only {' and '.join(names)} {went} {_called(level)}: {costs}."

    def cost_at(self, level: Mapping[str, Any], name: str) -> str:
        point = level["reached"][name]
        cost = self.shown.format(self.of(level["reached"], name))
        return f"{cost} and {point['peak_bytes'] / 1e6:.1f} MB"

    def ordered(self, reached: Reached) -> list[str]:
        """The methods that reached a level, the cheapest first."""
        return sorted(
            (name for name, at in reached.items() if at), key=lambda n: self.of(reached, n)
        )

    def of(self, reached: Reached, name: str) -> float:
        point = reached[name]
        assert point is not None
        return float(point[self.key])


JUDGES = {
    "seconds": Judge("seconds", "{:,.1f} s", "long"),
    "forward_passes": Judge("forward_passes", "{:,.0f} forward passes", "many"),
}


def _called(level: Mapping[str, Any]) -> str:
    return f"a loss of {level['loss']:.4f} ({level['meaning']})"
