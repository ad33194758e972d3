"""The length of a run, in steps and in epochs, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.config.methods import METHODS
from runtime.config.train import RANDOM_STEPS, TrainConfig
from runtime.core.errors import UsageError
from runtime.core.notes import Note
from runtime.core.units import counted, format_number
from runtime.data.samples import Samples


def settled(config: TrainConfig, samples: Samples, note: Note) -> TrainConfig:
    """The configuration with `steps` in place of `epochs`, and the rate; `note` is told the length.

    An epoch is each sample once: a row, or a sequence of packed rows. The last step of a run may
    take some rows of a further epoch.

    Raises:
        UsageError: epochs of random rows are asked for, which have no end.
    """
    config = replace(config, learning_rate=config.highest_rate)
    if config.data.startswith("random:"):
        if config.epochs is not None:
            raise UsageError(
                f"--epochs {config.epochs:g}: {config.data} has no end, so it has no epochs; give "
                "--steps"
            )
        return replace(config, steps=config.steps or RANDOM_STEPS)
    usual = METHODS[config.method]
    epochs, steps = config.epochs, config.steps
    if epochs is None and steps is None:
        epochs, steps = usual.epochs, None if usual.epochs else usual.steps
    if epochs is None:
        assert steps is not None
        epochs = steps * _size(config) / len(samples)
        note(f"{counted(steps, 'step')}{_batches(config)} = {_of(epochs, config, samples)}")
    else:
        # rounded, since 0.07 x 100 is a little more than 7
        steps = max(1, math.ceil(round(epochs * len(samples) / _size(config), 6)))
        note(f"{_of(epochs, config, samples)}{_batches(config)} = {counted(steps, 'step')}")
    return replace(config, epochs=None, steps=steps)


def epochs_of(config: TrainConfig, samples: Samples, steps: int) -> float | None:
    """How often so many steps train on all samples; None for random rows."""
    if config.data.startswith("random:"):
        return None
    return steps * _size(config) / len(samples)


def _size(config: TrainConfig) -> int:
    """The samples of a step."""
    return config.batch_size * config.grad_accumulation


def _batches(config: TrainConfig) -> str:
    accumulated = f", {config.grad_accumulation} a step," if config.grad_accumulation > 1 else ""
    return f" in batches of {config.batch_size}{accumulated}"


def _of(epochs: float, config: TrainConfig, samples: Samples) -> str:
    number = format_number(epochs)
    kind = "packed sequence" if config.pack else "row"
    return f"{number} epoch{'s' * (number != '1')} of {counted(len(samples), kind)}"


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step` (0-based): a linear warm-up, then the schedule to 0."""
    peak, warmup_steps = config.highest_rate, config.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, config.all_steps - warmup_steps)
    if config.lr_schedule == "linear":
        return peak * (1 - done)
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak
