"""The programs that are measured beside each other: ours, and the usual tools for LoRA training."""

from __future__ import annotations

import sys
from dataclasses import dataclass

OURS = "ours"
METHOD = "mebp"  # exact gradients, as the peers compute them
TORCH, MLX_LM = "harness.peers.torch_trainer", "harness.peers.mlx_lm_trainer"


@dataclass(frozen=True)
class Program:
    """A program to measure: the module of its process (none: `ondevice train`) and its flags."""

    what: str
    module: str = ""
    flags: tuple[str, ...] = ()
    once: bool = False  # a step takes minutes: one process of a single step is enough
    budget: str = ""  # in place of the benchmark's

    @property
    def as_it_comes(self) -> bool:
        """Whether it runs without our BLAS and settings."""
        return bool(self.module) and "--prepare" not in self.flags


_SLOW = sys.platform != "darwin"  # where MLX runs on the CPU, with a reference BLAS
PROGRAMS = {
    OURS: Program("ondevice train"),
    "torch-float32": Program("PyTorch + PEFT, float32", TORCH, ("--dtype", "float32")),
    "torch-bfloat16": Program("PyTorch + PEFT, bfloat16", TORCH, ("--dtype", "bfloat16")),
    "mlx-lm-blas": Program("mlx-lm's LoRA trainer, float32, with our BLAS", MLX_LM, ("--prepare",)),
    # its plan has nothing to choose, so a smaller budget would only refuse it
    "paper": Program("ondevice train --plan paper", flags=("--plan=paper",), budget="1TB"),
    "mlx-lm": Program("mlx-lm's LoRA trainer, float32, as it comes", MLX_LM, once=_SLOW),
    "mlx-lm-4bit": Program(
        "mlx-lm's LoRA trainer, 4-bit base, with our BLAS",
        MLX_LM,
        ("--prepare", "--bits", "4"),
        once=_SLOW,
    ),
}
DEFAULT = tuple(name for name in PROGRAMS if name != "mlx-lm-4bit")
