"""Types for values, adapters and gradients by name, which kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from runtime.engine.dropout import Dropout, Mask


@dataclass(frozen=True)
class Lora:
    """An adapter of one matrix: a (C, r), b (r, R), and the factor s of its output.

    `dropout` is None except in training.
    """

    a: mx.array
    b: mx.array
    scale: float
    dropout: Dropout | None = None

    def mask(self, x: mx.array) -> Mask | None:
        """Which values of the input x (T, C) are dropped; None without dropout."""
        return None if self.dropout is None else self.dropout.mask(*x.shape)

    def after(self, tokens: int) -> Lora:
        """The adapter for what follows so many tokens."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.after(tokens))


Loras = dict[str, Lora]
Gradients = dict[str, tuple[mx.array, mx.array]]  # (dA, dB) by the adapted matrix's relative name
Values = dict[str, mx.array]


def accumulate(total: Gradients, fresh: Gradients) -> None:
    """Add the gradients `fresh` to existing ones, evaluated; `fresh` is emptied."""
    while fresh:
        name, pair = fresh.popitem()
        if name in total:
            before = total.pop(name)
            pair = (before[0] + pair[0], before[1] + pair[1])
            del before  # so that there is no other reference to the summands
            mx.eval(pair)
        total[name] = pair
