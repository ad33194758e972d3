"""Whether the packages that ondevice needs are there, and those of its extras."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from harness.doctor.finding import Finding, Status

DISTRIBUTION = "ondevice-tune"
EXTRAS = {  # what they are for
    "demo": "Gemma 3 270M as a package, for `make demo`",
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
    """A finding for what is required, and one for each extra."""
    try:
        wanted = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        way = "install it, as with: pip install -e ."
        text = f"{DISTRIBUTION} runs from a folder, so its packages cannot be compared"
        return [Finding("packages", Status.WARNING, text, way)]
    extras: dict[str, list[str]] = {}
    required: list[str] = []
    for one in wanted:
        found = _EXTRA.search(one)
        if found is not None:
            extras.setdefault(found[1], []).append(one)
        elif _applies(one):
            required.append(one)
    return [_required(required), *(_extra(name, extras[name]) for name in extras)]


def _applies(requirement: str) -> bool:
    """Whether the requirement's marker holds here; of those that this distribution uses."""
    marker = requirement.partition(";")[2]
    for key, value in (
        ("sys_platform", sys.platform),
        ("platform_machine", platform.machine()),
    ):
        found = re.search(rf"""{key}\s*==\s*['"]([^'"]+)['"]""", marker)
        if found is not None and found[1] != value:
            return False
    return True


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return found[0]


def fits(version: str, requirement: str) -> bool:
    """Whether a version lies in a requirement's range, of bounds such as >=0.32.4,<0.33."""
    numbers = _numbers(version)
    for bound in _bounds(requirement):
        operator, limit = bound
        width = max(len(numbers), len(limit))
        ours, theirs = (one + (0,) * (width - len(one)) for one in (numbers, limit))
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
    """What is wrong with each requirement that is not met."""
    found = []
    for one in requirements:
        name = name_of(one)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name} is not installed")
            continue
        if not fits(version, one):
            ranges = one.partition(";")[0].removeprefix(name).strip()
            found.append(f"{name} {version} is installed, {ranges} is needed")
    return found


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
