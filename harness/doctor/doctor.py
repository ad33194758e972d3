"""`ondevice doctor`: which parts are there, which are missing, and the way out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from harness.doctor.finding import Finding, Status
from harness.doctor.machine import computer
from harness.measure.command import ondevice
from runtime.core.errors import BudgetError, OnDeviceError
from runtime.core.units import format_number
from runtime.machine.machine_code import is_built_for, lacking

PRODUCTS = "float32 products, GFLOP/s"
USUAL_GFLOPS = 50.0
SLOW_GFLOPS = 20.0  # the reference BLAS computes 4 on a core, an optimized one 50 and more
DISTRIBUTION = "ondevice-tune"
EXTRAS = {  # their purposes
    "demo": "Gemma 3 270M as a package, for `make demo`",
    "parquet": "data in .parquet files",
    "datasets": "data from the Hugging Face hub (--data OWNER/NAME)",
    "tensorboard": "ondevice train --report-to tensorboard",
    "wandb": "ondevice train --report-to wandb",
    "bench": "PyTorch and PEFT beside ours, and pictures in PNG",
    "dev": "tests and checks of ondevice itself",
}


def findings() -> Iterator[Finding]:
    """One finding after another; measuring takes a few seconds in between."""
    machine, *rest = computer()
    yield machine
    yield from computing()
    yield from rest
    yield from packages()


def verdict(findings: Sequence[Finding]) -> str:
    """The sum of all findings, in a sentence."""
    broken, warned, missing = (
        sum(finding.status is status for finding in findings)
        for status in (Status.BROKEN, Status.WARNING, Status.MISSING)
    )
    parts = [f"broken: {broken}" if broken else "all that is essential works"]
    if warned:
        parts.append(f"warnings: {warned}")
    if missing:
        parts.append(f"optional parts missing: {missing}")
    return ", ".join(parts)


def products_flops(findings: Sequence[Finding]) -> float:
    """The rate of products that was measured, in FLOP/s, or that of a usual machine."""
    speeds = (finding.facts["speeds"] for finding in findings if "speeds" in finding.facts)
    return 1e9 * next((known[PRODUCTS] for known in speeds), USUAL_GFLOPS)


def computing() -> list[Finding]:
    """Findings on MLX, its device, and the BLAS with its measured rate, of a process of its own."""
    try:
        probed = json.loads(ondevice("probe", module="harness.bench.probe_process"))
    except OnDeviceError as problem:
        way = "install MLX again: pip install --force-reinstall mlx"
        text = f"it cannot compute: {str(problem)[:300]}"
        return [Finding("MLX", Status.BROKEN, text, way)]
    return [_mlx(probed), _blas(probed), _products(probed), _compiled()]


def _mlx(probed: dict[str, Any]) -> Finding:
    text = f"{probed['mlx']}, computes on the {probed['device'].upper()}"
    facts = {"version": probed["mlx"], "device": probed["device"]}
    if sys.platform == "darwin" and probed["device"] == "cpu":
        none = f"its GPU, {probed['gpu']}, is not used" if probed["gpu"] else "there is no GPU"
        way = "a virtual machine has none of its own: a real Mac is faster"
        return Finding("MLX", Status.WARNING, f"{text}: {none}", way, facts)
    if probed["device"] == "gpu":
        text += f" ({probed['gpu']})"
        if probed["tf32"] != "0":
            way = "TF32 products have errors of 8e-4, in which MeZO's differences drown: unset "
            way += "MLX_ENABLE_TF32"
            return Finding("MLX", Status.WARNING, f"{text}, with TF32", way, facts)
        text += ", without TF32"
        if probed["nvidia"]:
            way = "budgets count MLX's memory on the card, but not the up to 2 GB that compiling a "
            way += "kernel takes when it is first met; they hold from the second run on"
            return Finding("MLX", Status.WARNING, text, way, facts)
    return Finding("MLX", Status.OK, text, facts=facts)


def _products(probed: dict[str, Any]) -> Finding:
    chosen = probed["products"]
    text = f"--compute-dtype auto takes {chosen['name']}: {chosen['reason']}"
    return Finding("products", Status.OK, text, facts=chosen)


def _compiled() -> Finding:
    try:
        why = lacking()
    except BudgetError as problem:  # the system has ended the process that compiles
        why = str(problem)
    if not why:
        return Finding("compiled code", Status.OK, "multiplies by quantized weights where they lie")
    status = Status.MISSING if is_built_for() else Status.OK  # elsewhere there is nothing to mend
    way = "all works without it, more slowly"
    return Finding("compiled code", status, f"weights are dequantized without: {why}", way)


def _blas(probed: dict[str, Any]) -> Finding:
    rate = probed["speeds"][PRODUCTS]
    text = f"{probed['blas']}, threads: {probed['threads']}"
    if probed["device"] == "gpu":
        text += "; the GPU multiplies"
    text += f" at {format_number(rate)} GFLOP/s in float32"
    facts = {"name": probed["blas"], "threads": probed["threads"], "speeds": probed["speeds"]}
    if probed["warning"]:
        return Finding("BLAS", Status.WARNING, text, probed["warning"], facts)
    if rate < SLOW_GFLOPS:
        way = "that is slow: other programs on the same cores may be the reason"
        return Finding("BLAS", Status.WARNING, text, way, facts)
    return Finding("BLAS", Status.OK, text, facts=facts)


def packages() -> list[Finding]:
    """A finding on the required packages, and one on each extra."""
    try:
        wanted = list(map(Requirement, metadata.requires(DISTRIBUTION) or []))
        extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        way = "install it, as with: pip install -e ."
        text = f"{DISTRIBUTION} runs from a folder, so its packages cannot be compared"
        return [Finding("packages", Status.WARNING, text, way)]
    required = [requirement for requirement in wanted if _applies(requirement, "")]
    of_extras = {
        name: [each for each in wanted if each not in required and _applies(each, name)]
        for name in extras
    }
    return [_required(required), *(_extra(name, of_extras[name]) for name in extras)]


def _applies(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement's marker holds here, for who wants an extra, or none."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _wrong(requirements: list[Requirement]) -> list[str]:
    """The problem of each requirement that is not met."""
    problems = []
    for requirement in requirements:
        name = requirement.name
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{name} {version} is installed, {requirement.specifier} is needed")
    return problems


def _required(requirements: list[Requirement]) -> Finding:
    wrong = _wrong(requirements)
    if wrong:
        way = f"pip install --upgrade {DISTRIBUTION}"
        return Finding("packages", Status.BROKEN, ", ".join(wrong), way)
    versions = {each.name: metadata.version(each.name) for each in requirements}
    text = f"the {len(versions)} that are needed are installed"
    return Finding("packages", Status.OK, text, facts={"versions": versions})


def _extra(name: str, requirements: list[Requirement]) -> Finding:
    wrong = _wrong(requirements)
    purpose = EXTRAS.get(name, "an optional part")
    if not wrong:
        return Finding(f"extra {name}", Status.OK, purpose)
    text = f"{purpose}: {', '.join(wrong)}"
    way = f"if you want it: pip install '{DISTRIBUTION}[{name}]'"
    return Finding(f"extra {name}", Status.MISSING, text, way)
