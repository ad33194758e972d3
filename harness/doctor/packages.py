"""Whether the packages that ondevice needs are there, and those of its extras."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from harness.doctor.finding import Finding, Status

DISTRIBUTION = "ondevice-tune"
EXTRAS = {  # their purposes
    "demo": "Gemma 3 270M as a package, for `make demo`",
    "onednn": "products in bfloat16 (--compute-dtype), on Linux x86-64",
    "parquet": "data in .parquet files",
    "datasets": "data from the Hugging Face hub (--data OWNER/NAME)",
    "tensorboard": "ondevice train --report-to tensorboard",
    "wandb": "ondevice train --report-to wandb",
    "bench": "PyTorch and PEFT beside ours, and pictures in PNG",
    "dev": "tests and checks of ondevice itself",
}
_EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def packages() -> list[Finding]:
    """A finding on the required packages, and one on each extra."""
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        way = "install it, as with: pip install -e ."
        text = f"{DISTRIBUTION} runs from a folder, so its packages cannot be compared"
        return [Finding("packages", Status.WARNING, text, way)]
    extras: dict[str, list[str]] = {}
    required: list[str] = []
    for requirement in wanted:
        extra = _EXTRA.search(requirement)
        if extra is not None:
            of_extra = extras.setdefault(extra[1], [])
            if _applies(requirement):
                of_extra.append(requirement)
        elif _applies(requirement):
            required.append(requirement)
    return [_required(required), *(_extra(name, extras[name]) for name in extras)]


def _applies(requirement: str) -> bool:
    """Whether the requirement's marker holds here; of those that this distribution uses."""
    marker = requirement.partition(";")[2]
    for key, value in (
        ("sys_platform", sys.platform),
        ("platform_machine", platform.machine()),
    ):
        match = re.search(rf"""{key}\s*==\s*['"]([^'"]+)['"]""", marker)
        if match is not None and match[1] != value:
            return False
    return True


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    match = _NAME.match(requirement)
    assert match is not None, requirement
    return match[0]


def fits(version: str, requirement: str) -> bool:
    """Whether a version lies in a requirement's range, of bounds such as >=0.32.4,<0.33."""
    numbers = _numbers(version)
    for bound in _bounds(requirement):
        operator, limit = bound
        width = max(len(numbers), len(limit))
        ours, theirs = (parts + (0,) * (width - len(parts)) for parts in (numbers, limit))
        right = {
            ">=": ours >= theirs,
            "<": ours < theirs,
            "==": ours == theirs,
            "<=": ours <= theirs,
            ">": ours > theirs,
        }
        if not right[operator]:
            return False
    return True


def _bounds(requirement: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for operator, limit in re.findall(r"(>=|<=|==|<|>)\s*([\d.]+)", requirement.partition(";")[0]):
        yield operator, _numbers(limit)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def _wrong(requirements: list[str]) -> list[str]:
    """The problem of each requirement that is not met."""
    problems = []
    for requirement in requirements:
        name = name_of(requirement)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed")
            continue
        if not fits(version, requirement):
            ranges = requirement.partition(";")[0].removeprefix(name).strip()
            problems.append(f"{name} {version} is installed, {ranges} is needed")
    return problems


def _required(requirements: list[str]) -> Finding:
    wrong = _wrong(requirements)
    if wrong:
        way = f"pip install --upgrade {DISTRIBUTION}"
        return Finding("packages", Status.BROKEN, ", ".join(wrong), way)
    versions = {name: metadata.version(name) for name in map(name_of, requirements)}
    text = f"the {len(versions)} that are needed are installed"
    return Finding("packages", Status.OK, text, facts={"versions": versions})


def _extra(name: str, requirements: list[str]) -> Finding:
    wrong = _wrong(requirements)
    what = EXTRAS.get(name, "an optional part")
    if not wrong:
        return Finding(f"extra {name}", Status.OK, what)
    text = f"{what}: {', '.join(wrong)}"
    way = f"if you want it: pip install '{DISTRIBUTION}[{name}]'"
    return Finding(f"extra {name}", Status.MISSING, text, way)
