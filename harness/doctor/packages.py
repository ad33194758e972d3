"""Whether the packages that ondevice needs are there, and those of its extras."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from harness.doctor.finding import Finding, Status

DISTRIBUTION = "ondevice-tune"
EXTRAS = {  # their purposes
    "demo": "Gemma 3 270M as a package, for `make demo`",
    "onednn": "products in bfloat16 (--compute-dtype), on Linux x86-64",
    "llvmlite": "faster training and generation on a CPU, on Linux x86-64",
    "parquet": "data in .parquet files",
    "datasets": "data from the Hugging Face hub (--data OWNER/NAME)",
    "tensorboard": "ondevice train --report-to tensorboard",
    "wandb": "ondevice train --report-to wandb",
    "bench": "PyTorch and PEFT beside ours, and pictures in PNG",
    "dev": "tests and checks of ondevice itself",
}


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
        name: [one for one in wanted if one not in required and _applies(one, name)]
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
    versions = {one.name: metadata.version(one.name) for one in requirements}
    text = f"the {len(versions)} that are needed are installed"
    return Finding("packages", Status.OK, text, facts={"versions": versions})


def _extra(name: str, requirements: list[Requirement]) -> Finding:
    wrong = _wrong(requirements)
    what = EXTRAS.get(name, "an optional part")
    if not wrong:
        return Finding(f"extra {name}", Status.OK, what)
    text = f"{what}: {', '.join(wrong)}"
    way = f"if you want it: pip install '{DISTRIBUTION}[{name}]'"
    return Finding(f"extra {name}", Status.MISSING, text, way)
