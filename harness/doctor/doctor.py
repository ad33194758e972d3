"""`ondevice doctor`: what is there, what is missing, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.doctor.computing import computing
from harness.doctor.finding import Finding, Status
from harness.doctor.machine import computer
from harness.doctor.packages import packages


def findings() -> Iterator[Finding]:
    """One finding after another; measuring takes a few seconds in between."""
    machine, *rest = computer()
    yield machine
    yield from computing()
    yield from rest
    yield from packages()


def verdict(found: Sequence[Finding]) -> str:
    """What all findings come to, in a sentence."""
    broken, warned, missing = (
        sum(one.status is status for one in found)
        for status in (Status.BROKEN, Status.WARNING, Status.MISSING)
    )
    parts = [f"broken: {broken}" if broken else "all that is essential works"]
    if warned:
        parts.append(f"warnings: {warned}")
    if missing:
        parts.append(f"optional parts missing: {missing}")
    return ", ".join(parts)
