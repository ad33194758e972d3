"""The options of `ondevice eval`, which measures the loss of a bundle or adapter."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.config.base import FILLED, NOT_NEGATIVE, option, refuse, required
from ondevice.config.shared import (
    DATA_FILE,
    HUB_DATA,
    BundleConfig,
    DataOptions,
    adapter_dtype_field,
    adapter_field,
)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(BundleConfig, DataOptions):
    """The options of `ondevice eval`, which measures the loss of a bundle or adapter."""

    data: str = required(
        f"held-out data: {DATA_FILE}, a folder with valid, {HUB_DATA}, or random:SEED", "DATA"
    )
    adapter: str | None = adapter_field(
        "adapter to apply: a run, an adapter directory or its .safetensors file "
        "(default: the base model)"
    )
    source: str | None = option(
        None,
        "checkpoint that the bundle was exported from: also measure how far the bundle's "
        "predictions are from its own (KL divergence)",
        FILLED,
        metavar="CHECKPOINT",
    )
    eval_rows: int = option(0, "rows to evaluate; 0 for all (of random:SEED one)", NOT_NEGATIVE)
    adapter_dtype: str = adapter_dtype_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is not None and self.adapter is not None:
            refuse(type(self), ["--source compares the base model: leave out --adapter"])
