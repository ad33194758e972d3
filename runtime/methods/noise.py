"""The directions z along which zeroth-order methods perturb, drawn when needed and never stored.

z of a tensor is a function of (seed, step, query, tensor name) alone. It is the same in any order
of execution, on resume, and on another worker.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import mlx.core as mx


def number_of(*parts: int | str) -> int:
    """A random number of 63 bits that depends on nothing but its parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def key_of(*parts: int | str) -> mx.array:
    """A random key that depends on nothing but its parts."""
    key: mx.array = mx.random.key(number_of(*parts))
    return key


KINDS = ("gaussian", "rademacher")


@dataclass(frozen=True)
class Noise:
    """The noise of one run: `kind` is "gaussian" (N(0, 1)) or "rademacher" (-1 or 1)."""

    seed: int
    kind: str = "gaussian"

    def draw(self, step: int, query: int, tensor: str, shape: tuple[int, ...]) -> mx.array:
        """z of `tensor`, float32, with mean 0 and variance 1 in every element.

        It is drawn on the CPU: a GPU's normal deviates have other last bits.
        """
        key = key_of(self.seed, "noise", step, query, tensor)
        if self.kind == "rademacher":
            positive = mx.random.bernoulli(0.5, shape, key=key, stream=mx.cpu)
            return mx.where(positive, 1.0, -1.0)
        return mx.random.normal(shape, key=key, stream=mx.cpu)
