"""The trials of a sweep, how each of them ended, and a comparison's finding on a method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from harness.config.compare import CompareConfig
from harness.report.curve import Curve
from runtime.config.lora import LoraOptions
from runtime.config.methods import METHODS, OPTIONS_OF


@dataclass(frozen=True)
class Trial:
    """A method with a value for each training option that its sweep is about."""

    method: str
    values: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name of its run folder."""
        parts = [f"{option.replace('_', '-')}-{value!r}" for option, value in self.values.items()]
        return "-".join([self.method, *parts])

    def __str__(self) -> str:
        words = [f"{option.replace('_', ' ')} {value:g}" for option, value in self.values.items()]
        return ", ".join(words)


@dataclass(frozen=True)
class Tried:
    """How a trial ended: "finished", "diverged" or "over budget", or "rose" in a longer run.

    The losses are held-out ones, before and after `steps` steps; None if they are not known.
    """

    trial: Trial
    outcome: str
    reason: str
    loss_before: float | None
    loss: float | None
    training_s: float | None
    steps: int = 0


@dataclass(frozen=True)
class Finding:
    """A method's sweep and its run.

    `chosen` is the index of the trial that was run, `outcome` "finished", "diverged" or "over
    budget"; `curve` and `summary` are None if the run did not get so far.
    """

    trial: Trial | None
    tried: tuple[Tried, ...]
    chosen: int | None
    outcome: str
    reason: str
    curve: Curve | None
    summary: dict[str, Any] | None


def grid(config: CompareConfig, method: str) -> list[Trial]:
    """Every combination of values that the sweep of `method` tries."""
    searched = config.searched(method)
    return [
        Trial(method, dict(zip(searched, values, strict=True)))
        for values in product(*searched.values())
    ]


def choose(tried: Sequence[Tried]) -> int | None:
    """The index of the best finished trial: of those that went furthest, the lowest held-out loss.

    None if none finished.
    """
    order = ranked(tried, range(len(tried)))
    return order[0] if order else None


def ranked(tried: Sequence[Tried], indices: Iterable[int]) -> list[int]:
    """Those of `indices` whose trials finished, the best first."""

    def key(index: int) -> tuple[int, float]:
        loss = tried[index].loss
        assert loss is not None
        return -tried[index].steps, loss

    finished = [i for i in indices if tried[i].outcome == "finished" and tried[i].loss is not None]
    return sorted(finished, key=key)


def without(
    tried: tuple[Tried, ...], index: int, outcome: str = "", reason: str = ""
) -> tuple[Tried, ...]:
    """`tried` with another outcome for one of them, so that it is not chosen."""
    changed = replace(tried[index], outcome=outcome, reason=reason)
    return (*tried[:index], changed, *tried[index + 1 :])


def training_settings(config: CompareConfig, trial: Trial) -> dict[str, Any]:
    """Settings of every run of `trial`."""
    shared = (
        *("bundle", "data", "budget", "device", "arithmetic", "batch_size", "seed"),
        *("optimizer", "loss_on", "skip_bad_rows", "keep_empty", "pack"),
    )
    settings: dict[str, Any] = {name: getattr(config, name) for name in shared}
    settings["lr_schedule"] = "constant"  # a trial that goes on for more steps stays what it was
    given = (
        "max_seq_length",
        "queries",
        "eval_data",
        "columns",
        "valid_split",
        "trainable",
        "prefix_length",
        "parallel",
    )
    for name in (*given, *(option.name for option in fields(LoraOptions))):
        only_of = OPTIONS_OF.get(name, METHODS)
        if getattr(config, name) is not None and trial.method in only_of:
            settings[name] = getattr(config, name)
    return settings | {"method": trial.method, **trial.values}
