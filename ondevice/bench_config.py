"""What `ondevice bench` is told to do: a configuration like those of `ondevice.config`.

Lists (models, lengths, plans, budgets) are one text with commas, each name once; what is left out
is what the paper measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.config import (
    _COUNT,
    _FILLED,
    _NOT_NEGATIVE,
    _Check,
    _Config,
    _is_size,
    _option,
    _required,
)

PLANS = ("budget", "paper")
SMALLEST = "min"


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _once(text: str) -> bool:
    parts = _parts(text)
    return all(parts) and len({*parts}) == len(parts)


def _are_lengths(text: str) -> bool:
    parts = _parts(text)
    return _once(text) and all(p.isascii() and p.isdecimal() and int(p) > 0 for p in parts)


_NAMES = _Check(_once, "names, each once")
_LENGTHS = _Check(_are_lengths, "whole numbers above 0, each once")
_PLANS = _Check(
    lambda text: _once(text) and {*_parts(text)} <= {*PLANS}, "budget, paper or budget,paper"
)
_BUDGETS = _Check(
    lambda text: _once(text) and all(p == SMALLEST or _is_size(p) for p in _parts(text)),
    f"sizes such as 300MB, or {SMALLEST} for the smallest that fits, each once",
)
_TIMED = _Check(lambda value: value >= 2, "2 or more: the first step of a process is not timed")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(_Config):
    """`ondevice bench`: a published measurement, made on this machine."""

    positional = "name"

    name: str = _required("benchmark, such as mebp-table2; any other name lists them all")
    bundles: str = _option("bundles", "directory of the bundles, made when first needed", _FILLED)
    models: str | None = _option(None, "models, as a,b (else the paper's)", _NAMES)
    seq_lens: str | None = _option(None, "tokens, as 128,256 (else the paper's)", _LENGTHS)
    plans: str = _option("budget,paper", "memory plans: ours, as MeBP's paper, or both", _PLANS)
    budget: str = _option("1GB", "budgets of our plan, as 1GB,min (the smallest)", _BUDGETS)
    steps: int = _option(3, "steps of each process; the first is not timed", _TIMED)
    repeats: int = _option(2, "fresh processes of each variant, in turn", _COUNT)
    seed: int = _option(0, "seed of the random rows", _NOT_NEGATIVE)
    output: str | None = _option(None, "JSON file to write (else NAME.json)", _FILLED)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The models that were asked for; none for the paper's."""
        return _parts(self.models) if self.models else ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens per row that were asked for, rising; none for the paper's."""
        return tuple(sorted(map(int, _parts(self.seq_lens)))) if self.seq_lens else ()

    @property
    def plan_names(self) -> tuple[str, ...]:
        """The memory plans, ours first."""
        return tuple(name for name in PLANS if name in _parts(self.plans))

    @property
    def budgets(self) -> tuple[str, ...]:
        """The budgets of our plan, in the order given."""
        return _parts(self.budget)
