"""The lines of metrics.jsonl: what each step took and found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from runtime.core.errors import BundleError

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StepLine(msgspec.Struct, frozen=True):
    """A line, as far as a run reads it again; the loss is None where it was not finite."""

    step: _Count
    loss: float | None
    tokens: _Count
    processed_tokens: _Count
    forward_passes: _Count
    seconds: _Seconds
    peak_footprint_bytes: _Count
    peak_rss_bytes: _Count


def read_steps(path: Path, steps: int, way_out: str) -> Iterator[StepLine]:
    """The lines of the first `steps` steps, each checked when it is read.

    Raises:
        BundleError: one is damaged or missing.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if number > steps:
                    return
                line = msgspec.json.decode(text, type=StepLine)
                if line.step != number:
                    raise BundleError(
                        f"{path} is damaged: line {number} is that of step {line.step}; {way_out}"
                    )
                yield line
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        raise BundleError(f"{path} is damaged in line {number}: {problem}; {way_out}") from None
    if number < steps:
        raise BundleError(f"{path} has {number} lines for {steps} steps; {way_out}")
