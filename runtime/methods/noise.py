"""The directions z along which zeroth-order methods perturb, drawn when needed and never stored.

z of a tensor is a function of (seed, step, query, tensor name) alone, through a member of the pool
where there is one. It is the same in any order of execution, on resume, and on another worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from runtime.config.zeroth_order import MOST_POOL
from runtime.methods.log_header import Header, Part


def number_of(*parts: int | str) -> int:
    """A random number of 63 bits that depends on nothing but its parts."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def key_of(*parts: int | str) -> mx.array:
    """A random key that depends on nothing but its parts."""
    key: mx.array = mx.random.key(number_of(*parts))
    return key


@dataclass(frozen=True)
class Noise(Part):
    """The noise of one run: `kind` is "gaussian" (N(0, 1)) or "rademacher" (-1 or 1).

    With a `pool`, steps and queries draw one of so many directions; else each has its own.
    """

    seed: int
    kind: str = "gaussian"
    pool: int = 0
    log_fields = ("pool",)

    @classmethod
    def of_log(cls, header: Header) -> Noise:
        """The noise that a log's header describes."""
        return cls(header.seed, header.noise, header.more.get("pool", 0))

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        pool = fields["pool"]
        if type(pool) is not int or not 0 <= pool <= MOST_POOL:
            raise ValueError(f"its pool of directions is {pool!r}")

    def header(self) -> dict[str, Any]:
        return {"pool": self.pool} if self.pool else {}

    def draw(self, step: int, query: int, tensor: str, shape: tuple[int, ...]) -> mx.array:
        """z of `tensor`, float32, with mean 0 and variance 1 in every element.

        It is drawn on the CPU: a GPU's normal deviates have other last bits.
        """
        if self.pool:
            key = key_of(self.seed, "pool", self.member(step, query), tensor)
        else:
            key = key_of(self.seed, "noise", step, query, tensor)
        if self.kind == "rademacher":
            positive = mx.random.bernoulli(0.5, shape, key=key, stream=mx.cpu)
            return mx.where(positive, 1.0, -1.0)
        return mx.random.normal(shape, key=key, stream=mx.cpu)

    def member(self, step: int, query: int) -> int:
        """Which of the pool's directions a query takes, each with the same probability."""
        return number_of(self.seed, "member", step, query) % self.pool
