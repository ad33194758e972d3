"""Types for values, adapters and gradients by name, which kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Lora:
    """An adapter of one matrix: a (C, r), b (r, R), and the factor s = alpha / r."""

    a: mx.array
    b: mx.array
    scale: float


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
