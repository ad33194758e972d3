"""Gradient clipping by the norm of all gradients together, which are held in a scratch file.

The norm is known only when the backward pass has reached the first layer. Until then each block's
gradients g wait on disk, summed over micro-batches; then each update takes

    g * min(1, most / (norm + 1e-6))        norm = sqrt(sum of all squares)

as `torch.nn.utils.clip_grad_norm_` and `mlx.optimizers.clip_grad_norm` do. In memory are only the
gradients of the block that is being stored or updated.
"""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx

from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients
from runtime.core.errors import DivergedError
from runtime.methods.adapters import Adapters
from runtime.methods.optimizer import Optimizer
from runtime.storage.scratch import MappedTensors

EPSILON = 1e-6  # as in PyTorch and MLX: keeps the quotient finite where all gradients are zero


class Clipping:
    """Holds the gradients of a step until their norm is known, then has them applied."""

    def __init__(self, adapters: Adapters, most: float, folder: Path) -> None:
        self.adapters = adapters
        self.most = most
        shapes = Adapters.shapes(adapters.manifest)
        self._gradients = MappedTensors(folder, "gradients", shapes)
        self._stored: set[str] = set()

    def store(self, block: Block, gradients: Gradients) -> None:
        """Store a block's gradients (dA, dB by relative name); those of further parts are added."""
        for name, pair in gradients.items():
            names = self.adapters.manifest.adapter_names(block, name)
            for full, gradient in zip(names, pair, strict=True):
                value = gradient
                if full in self._stored:
                    value = self._gradients[full] + gradient
                    mx.eval(value)
                self._gradients[full] = value
                self._stored.add(full)

    def add_to(self, block: Block, gradients: Gradients) -> None:
        """Add what is stored of a block to its gradients, tensor by tensor, and forget it."""
        for name in list(gradients):
            first, second = self.adapters.manifest.adapter_names(block, name)
            if first in self._stored:
                da, db = gradients.pop(name)
                da, db = da + self._gradients[first], db + self._gradients[second]
                mx.eval(da, db)
                gradients[name] = (da, db)
                self._stored -= {first, second}

    def apply(self, optimizer: Optimizer) -> float:
        """Update every block with its clipped gradients; returns their norm before clipping.

        Raises:
            DivergedError: the norm is not finite; no update has been made.
        """
        norm = self._norm()
        if not math.isfinite(norm):
            raise DivergedError(
                f"the norm of the gradients is {norm}; the last save is intact; lower "
                "--learning-rate"
            )
        scale = min(1.0, self.most / (norm + EPSILON))
        manifest = self.adapters.manifest
        for block in reversed(manifest.blocks):
            scaled: Gradients = {}
            for name in manifest.adapted(block):
                first, second = manifest.adapter_names(block, name)
                da, db = self._gradients[first] * scale, self._gradients[second] * scale
                mx.eval(da, db)
                scaled[name] = (da, db)
            optimizer.apply(block, scaled)
        self._stored.clear()
        return norm

    def _norm(self) -> float:
        """The norm of all stored gradients; each tensor's squares are summed in float32."""
        squares = [
            float(mx.square(self._gradients[name]).sum().item())  # type: ignore[arg-type]
            for name in self._gradients
        ]
        return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
