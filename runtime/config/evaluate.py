"""The options of `ondevice eval`, which measures a bundle or adapter on held-out data."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.base import (
    FILLED,
    NOT_NEGATIVE,
    choice,
    option,
    refuse,
    required,
)
from runtime.config.parallel import parallel_field
from runtime.config.shared import (
    DATA_FILE,
    HUB_DATA,
    BundleConfig,
    DataOptions,
    adapter_field,
)

TASKS = ("perplexity", "labels", "exact")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(BundleConfig, DataOptions):
    """The options of `ondevice eval`, which measures a bundle or adapter on held-out data."""

    data: str = required(
        f"held-out data: {DATA_FILE}, a folder with valid, {HUB_DATA}, or random:SEED", "DATA"
    )
    adapter: str | None = adapter_field()
    task: str = choice(
        "perplexity",
        "what is measured: the loss of the tokens (perplexity); how often the right label is the "
        "most likely of the labels in the data (labels); or how many rows have nothing but "
        "most likely tokens (exact)",
        *TASKS,
    )
    source: str | None = option(
        None,
        "checkpoint that the bundle was exported from: also measure how far the bundle's "
        "predictions are from its own (KL divergence)",
        FILLED,
        metavar="CHECKPOINT",
    )
    eval_rows: int = option(0, "rows to evaluate; 0 for all (of random:SEED one)", NOT_NEGATIVE)
    parallel: str | None = parallel_field("data")

    def __post_init__(self) -> None:
        super().__post_init__()
        compared = {
            "adapter": "the base model",
            "task": "predictions",
            "arithmetic": "models in one arithmetic",
            "parallel": "in one process",
        }
        problems = [
            f"--source compares {models}: leave out --{name}"
            for name, models in compared.items()
            if self.source is not None and self.was_given(name)
        ]
        refuse(type(self), problems)
