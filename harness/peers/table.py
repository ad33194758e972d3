"""The report of `ondevice bench peers` as a table, and what has to be said beside it.

Invariant: every peer of the report is in the text, with its figures or with the reason why it has
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADINGS = (
    "peer",
    "s/step",
    "training MB",
    "process MB",
    "VmHWM MB",
    "time, ours/peer",
    "peak, ours/peer",
)
NONE = "-"
BUSY_CORES = 0.1  # more than a system at rest uses


def to_text(report: Mapping[str, Any]) -> str:
    """The table in Markdown, then one line for each thing that a reader has to know."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS), *cells(report)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    return "\n".join([_heading(report), "", *lines, "", *notes(report)])


def cells(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each peer, under HEADINGS."""
    return [_row(name, found) for name, found in report["peers"].items()]


def notes(report: Mapping[str, Any]) -> list[str]:
    """What the figures of a report do not say by themselves."""
    said = [
        "median (least to greatest); ratios are of processes in the same round, below 1 where ours "
        "is less",
        "training MB leaves the peer's loading out; of ours the whole process counts there too",
    ]
    said += [
        f"NOT OUR CHOICE: {name}={value} was set before, and ours ran with it; unset it to measure "
        "what ondevice chooses"
        for name, value in report["inherited"].items()
    ]
    trained = {}
    for name, found in report["peers"].items():
        if found["reason"]:
            said.append(f"{name} {found['outcome']}: {found['reason']}")
        if found["outcome"] == "could not run":
            continue
        if not found["warm_up_steps"]:
            said.append(f"{name} ran a single step: what a first step does once is in it")
        first = next(iter(found["rounds"].values()))
        trained[name] = first["trainable_parameters"]
        said.append(f"{name}: {found['what']}, threads {first['threads']}, BLAS {first['blas']}")
        for number, one in found["rounds"].items():
            if (one["other_cores"] or 0) > BUSY_CORES:
                said.append(
                    f"NOT ALONE: other programs kept {one['other_cores']:.2f} cores busy while "
                    f"{name} ran in round {number}; measure again on an idle machine"
                )
    if len(set(trained.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in trained.items())
        said.append(f"NOT THE SAME LORA, numbers of trainable parameters differ: {counts}")
    return said


def _heading(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f"{report['preset']} shapes, {report['tokens']} tokens, batch {report['batch']}, LoRA rank "
        f"{report['lora']['rank']}, {report['rounds']} rounds of {report['steps']} steps, "
        f"{report['threads']} threads, {report['machine']['platform']}; {versions}"
    )


def _row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if found["outcome"] == "could not run":
        return (name, "could not run", *(NONE for _ in HEADINGS[2:]))
    return (
        name,
        _spread(found["step_s"], ".2f"),
        *(
            _spread(found[key], ".0f", 1e6)
            for key in ("training_peak_bytes", "peak_footprint_bytes", "peak_rss_bytes")
        ),
        _spread(found["time_ratio"], ".3f"),
        _spread(found["peak_ratio"], ".3f"),
    )


def _spread(found: Mapping[str, Any] | None, form: str, unit: float = 1.0) -> str:
    if found is None:
        return NONE
    middle, low, high = (format(found[key] / unit, form) for key in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = (
        cell.ljust(width, "-" if cell == "---" else " ")
        for cell, width in zip(row, widths, strict=True)
    )
    return f"| {' | '.join(cells)} |"
