"""`ondevice doctor`: what is there, what is missing, and the way out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from harness.doctor.finding import Finding, Status
from harness.doctor.machine import computer
from harness.doctor.packages import packages
from harness.measure.command import ondevice
from runtime.core.errors import OnDeviceError

PRODUCTS = "float32 products, GFLOP/s"
SLOW_GFLOPS = 20.0  # the reference BLAS computes 4 on a core, an optimized one 50 and more


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


def computing() -> list[Finding]:
    """Findings on MLX, its device, and the BLAS with its measured rate, of a process of its own."""
    try:
        found = json.loads(ondevice("probe", module="harness.bench.probe_process"))
    except OnDeviceError as problem:
        way = "install MLX again: pip install --force-reinstall mlx"
        text = f"it cannot compute: {str(problem)[:300]}"
        return [Finding("MLX", Status.BROKEN, text, way)]
    return [_mlx(found), _blas(found)]


def _mlx(found: dict[str, Any]) -> Finding:
    text = f"{found['mlx']}, computes on the {found['device'].upper()}"
    facts = {"version": found["mlx"], "device": found["device"]}
    if sys.platform == "darwin" and found["device"] == "cpu":
        way = "a virtual machine has none: --device cpu is what is used"
        return Finding("MLX", Status.WARNING, f"{text}: there is no GPU", way, facts)
    return Finding("MLX", Status.OK, text, facts=facts)


def _blas(found: dict[str, Any]) -> Finding:
    rate = found["speeds"][PRODUCTS]
    text = f"{found['blas']}, threads: {found['threads']}"
    if found["device"] == "gpu":
        text += "; the GPU multiplies"
    text += f" at {rate:.0f} GFLOP/s in float32"
    facts = {"name": found["blas"], "threads": found["threads"], "speeds": found["speeds"]}
    if found["warning"]:
        return Finding("BLAS", Status.WARNING, text, found["warning"], facts)
    if rate < SLOW_GFLOPS:
        way = "that is slow: other programs on the same cores may be the reason"
        return Finding("BLAS", Status.WARNING, text, way, facts)
    return Finding("BLAS", Status.OK, text, facts=facts)
