"""Measurements of several programs in turn: medians, spreads, and ratios within each round.

Invariant: a ratio is between two processes of the same round, which ran one after the other; what
is said of many rounds is the median of such ratios with the least and the greatest of them, never
a ratio of medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The middle of some values and how far they reach."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Sample:
    """One process: its steps, and its peaks while they ran and in all.

    `step_peak_bytes` is None where only the peak of the whole process is known.
    """

    step_s: tuple[float, ...]
    step_peak_bytes: tuple[int, ...] | None
    peak_footprint_bytes: int
    peak_rss_bytes: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Sample:
        peaks = found["step_peak_bytes"]
        return cls(
            tuple(found["step_s"]),
            None if peaks is None else tuple(peaks),
            int(found["peak_footprint_bytes"]),
            int(found["peak_rss_bytes"]),
        )

    @property
    def timed(self) -> tuple[float, ...]:
        """Seconds of the steps that count: the first is warm-up, unless it is the only one."""
        return self.step_s[1:] or self.step_s

    @property
    def training_peak_bytes(self) -> int:
        """The peak while steps ran; of the whole process where that is all that is known."""
        known = self.step_peak_bytes
        return self.peak_footprint_bytes if known is None else max(known)


Rounds = Mapping[int, Sample]  # by the number of the round


def summarize(found: Rounds, ours: Rounds) -> dict[str, Any]:
    """Spreads over all rounds of a program, and ratios to ours over those that both ran in."""
    samples = list(found.values())
    both = [(ours[number], sample) for number, sample in found.items() if number in ours]
    times = [statistics.median(one.timed) / statistics.median(other.timed) for one, other in both]
    peaks = [one.training_peak_bytes / other.training_peak_bytes for one, other in both]
    return {
        "warm_up_steps": min(len(sample.step_s) - len(sample.timed) for sample in samples),
        "step_s": _spread([second for sample in samples for second in sample.timed]),
        "training_peak_bytes": _spread([sample.training_peak_bytes for sample in samples]),
        "peak_footprint_bytes": _spread([sample.peak_footprint_bytes for sample in samples]),
        "peak_rss_bytes": _spread([sample.peak_rss_bytes for sample in samples]),
        "time_ratio": _spread(times),
        "peak_ratio": _spread(peaks),
    }


def _spread(values: Sequence[float]) -> dict[str, Any] | None:
    return asdict(Spread.of(values)) if values else None
