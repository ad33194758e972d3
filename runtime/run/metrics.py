"""The lines of metrics.jsonl: what each step took and found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from runtime.core.errors import BundleError

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training step, as a line of metrics.jsonl holds it.

    number: counted from 1.
    loss: the mean over the scored tokens before the update; None where it was not finite.
    scored_tokens: the tokens that have a loss. tokens: all that were processed.
    forward_passes: samples that were run forward for the objective.
    footprint_bytes: after the step. peak_footprint_bytes, peak_rss_bytes: so far.
    skipped: whether a loss was not finite, and nothing was learned.
    trained_loss: the mean of the loss that is trained, where it is not the cross entropy.
    objective, learned: the share of right answers where that is raised, and whether it has changed.
    gradient_norm: of all gradients, before they were clipped.
    """

    number: _Count = msgspec.field(name="step")
    loss: float | None
    learning_rate: float
    scored_tokens: _Count
    tokens: _Count
    forward_passes: _Count
    seconds: _Seconds
    footprint_bytes: _Count
    peak_footprint_bytes: _Count
    peak_rss_bytes: _Count
    skipped: bool = False
    trained_loss: float | None = None
    objective: float | None = None
    learned: bool | None = None
    gradient_norm: float | None = None


def _step(text: bytes) -> Step:
    """The step of a line; those of older versions call their tokens otherwise."""
    line = msgspec.json.decode(text, type=dict[str, Any])
    if "processed_tokens" in line:
        line["scored_tokens"], line["tokens"] = line.get("tokens"), line["processed_tokens"]
    return msgspec.convert(line, Step)


def read_steps(path: Path, steps: int, way_out: str) -> Iterator[Step]:
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
                step = _step(text)
                if step.number != number:
                    raise BundleError(
                        f"{path} is damaged: line {number} is that of step {step.number}; {way_out}"
                    )
                yield step
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as problem:
        raise BundleError(f"{path} is damaged in line {number}: {problem}; {way_out}") from None
    if number < steps:
        raise BundleError(f"{path} has {number} lines for {steps} steps; {way_out}")
