"""Options that several commands share: bundle, memory budget, and the size of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ondevice.config.base import (
    COUNT,
    FILLED,
    NOT_NEGATIVE,
    SIZE,
    Config,
    Group,
    choice,
    option,
    required,
)
from ondevice.methods import METHODS
from ondevice.units import parse_bytes

DEVICES = ("auto", "cpu", "gpu")
TRAIN_DATA = "training data: a .txt or .jsonl file, a folder with train and valid, or random:SEED"


def bundle_field() -> Any:
    """The field for the bundle that a command uses."""
    return required("bundle directory, written by `ondevice export`", "BUNDLE")


def adapter_field(text: str) -> Any:
    """The field for a trained LoRA adapter to apply."""
    return option(None, text, FILLED, metavar="PATH")


def adapter_dtype_field() -> Any:
    """The field for the precision of the current block's adapters."""
    text = "precision of the current block's adapters in memory; on disk they are float32"
    return choice("float32", text, "float32", "bfloat16", group=Group.MEMORY)


@dataclass(frozen=True, kw_only=True)
class BundleConfig(Config):
    """Options of commands that use a bundle under a memory budget."""

    bundle: str = bundle_field()
    budget: str = option(
        "1GB",
        "memory footprint that the process may reach, such as 300MB or 512MiB",
        SIZE,
        Group.MEMORY,
        metavar="SIZE",
    )
    max_seq_length: int = option(
        256,
        "tokens to predict per row; longer rows are cut",
        COUNT,
        Group.MEMORY,
        aliases=("--seq-len",),
    )
    arithmetic: str = choice(
        "auto",
        "multiply quantized weights as they are (packed), or dequantized tiles (unpacked); "
        "auto: packed on a GPU, unpacked on a CPU",
        "auto",
        "packed",
        "unpacked",
        group=Group.MEMORY,
    )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.budget)


@dataclass(frozen=True, kw_only=True)
class StepConfig(BundleConfig):
    """Options of a training step on which its memory depends."""

    method: str = choice(
        "mebp",
        "exact gradients (mebp), or estimates from forward passes only (mezo)",
        *METHODS,
        group=Group.TRAINING,
    )
    batch_size: int = option(1, "rows per batch", COUNT, Group.TRAINING)
    grad_accumulation: int = option(
        1, "batches whose gradients are accumulated per step", COUNT, Group.TRAINING
    )
    optimizer: str = choice(
        "adamw", "optimizer of mebp; mezo does plain SGD", "adamw", "sgd", group=Group.TRAINING
    )
    max_grad_norm: float = option(
        0.0,
        "largest norm of all gradients together, beyond which they are scaled down; 0 for no "
        "limit; not with mezo",
        NOT_NEGATIVE,
        Group.TRAINING,
    )
    queries: int = option(1, "random directions averaged per step", COUNT, Group.MEZO)
    plan: str = choice(
        "budget",
        "memory plan: fitted to the budget, or as in the MeBP paper, a whole layer dequantized at "
        "once and full logits",
        "budget",
        "paper",
        group=Group.MEMORY,
    )
    prefetch: bool = option(
        True, "read the next block's weights while a block computes", group=Group.MEMORY
    )
    adapter_dtype: str = adapter_dtype_field()
