"""The optimizer, applied tensor by tensor; its state lives in a mapped scratch file.

The rules are mlx.optimizers' own (AdamW with bias correction, as PyTorch's; SGD). Only the tensor
being updated has its moments in memory.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim

from ondevice.bundle import storage_errors
from ondevice.errors import BundleError
from ondevice.manifest import Block
from runtime.adapters import Adapters
from runtime.executor import Gradients
from runtime.scratch import MappedTensors

MOMENTS = ("m", "v")


def learning_rate(peak: float, schedule: str, warmup_steps: int, steps: int, step: int) -> float:
    """The rate of step `step` (0-based): a linear warm-up to `peak`, then the schedule to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    return peak


class Optimizer:
    """Updates adapters in place, and keeps their moments in a file that vanishes."""

    def __init__(self, adapters: Adapters, name: str, weight_decay: float, folder: Path) -> None:
        self.adapters = adapters
        self.rule: optim.Optimizer
        if name == "adamw":
            self.rule = optim.AdamW(1e-4, weight_decay=weight_decay, bias_correction=True)
        else:
            self.rule = optim.SGD(1e-4, weight_decay=weight_decay)
        self.moments = MOMENTS if name == "adamw" else ()
        shapes = {
            f"{tensor}.{moment}": shape
            for tensor, shape in Adapters.shapes(adapters.manifest).items()
            for moment in self.moments
        }
        self._state = MappedTensors(folder, "optimizer", shapes)

    def begin(self, step: int, rate: float) -> None:
        """Set the step (0-based) and learning rate of the updates that follow."""
        self.rule.state["step"] = mx.array(step + 1, mx.uint64)
        self.rule.learning_rate = rate

    def apply(self, block: Block, gradients: Gradients) -> None:
        """Update the block's adapters with (dA, dB) by relative name."""
        for name, pair in gradients.items():
            for suffix, gradient in zip(("lora_a", "lora_b"), pair, strict=True):
                tensor = f"{block.tensor(name)}.{suffix}"
                self._apply(tensor, gradient)

    def _apply(self, tensor: str, gradient: mx.array) -> None:
        state = {moment: self._state[f"{tensor}.{moment}"] for moment in self.moments}
        value = self.rule.apply_single(gradient, self.adapters.tensors[tensor], state)
        mx.eval(value, state)
        self.adapters.tensors[tensor] = value
        for moment in self.moments:
            self._state[f"{tensor}.{moment}"] = state[moment]

    def write(self, path: Path) -> None:
        """Write the moments to a file, in the order of `Adapters.shapes`."""
        with storage_errors(path), path.open("wb") as file:
            self._state.write(file)
            file.flush()
            os.fsync(file.fileno())

    def read(self, path: Path) -> None:
        """Read what `write` wrote.

        Raises:
            BundleError: the file has another size.
        """
        size, expected = path.stat().st_size, self._state.nbytes
        if size != expected:
            raise BundleError(f"{path} has {size} bytes, expected {expected}")
        with path.open("rb") as file:
            self._state.read(file)
