"""The directions z along which zeroth-order methods perturb, drawn when needed and never stored.

z of a tensor is a function of (seed, step, query, tensor name) alone, through a member of the pool
where there is one. It is the same in any order of execution, on resume, and on another worker.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import mlx.core as mx
import numpy as np


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
    """The noise of one run: `kind` is "gaussian" (N(0, 1)) or "rademacher" (-1 or 1).

    With a `pool`, steps and queries draw one of so many directions; else each has its own. With a
    `rank`, the direction of a matrix (M, N) is U V^T, with U (M, rank) and V (N, rank) of that
    kind: V stays for `interval` steps. With `flipout`, all queries of a step share
    noise of that kind, of which each turns the signs of random rows and columns (Wen et al., arXiv
    1803.04386). With `orthonormal` the direction of a matrix (M, N) is P Psi, and the rank is
    k: P (M, k) has orthonormal columns and stays for `interval` steps; Psi (k, N) is of that kind.
    """

    seed: int
    kind: str = "gaussian"
    pool: int = 0
    rank: int = 0
    interval: int = 0
    flipout: bool = False
    orthonormal: bool = False

    def draw(self, step: int, query: int, tensor: str, shape: tuple[int, ...]) -> mx.array:
        """z of `tensor`, float32, with mean 0 and variance 1 in every element.

        With a rank, the variance is the rank, and in an orthonormal subspace k / M.
        """
        if self.orthonormal:
            psi = self.coordinates(step, query, tensor, shape)
            return self.subspace(step, tensor, shape) @ psi
        if self.rank:
            u, v = self.factors(step, query, tensor, shape)
            return u @ v.T
        if self.flipout:
            rows, columns = shape
            r = _signs((rows, 1), key_of(self.seed, "rows", step, query, tensor))
            s = _signs((1, columns), key_of(self.seed, "columns", step, query, tensor))
            return self._values(shape, "shared", step, tensor) * r * s
        if self.pool:
            return self._values(shape, "pool", self.member(step, query), tensor)
        return self._values(shape, "noise", step, query, tensor)

    def factors(
        self, step: int, query: int, tensor: str, shape: tuple[int, ...]
    ) -> tuple[mx.array, mx.array]:
        """U (M, rank) and V (N, rank) of a tensor (M, N), where directions have a rank."""
        rows, columns = shape
        u = self._values((rows, self.rank), "U", step, query, tensor)
        v = self._values((columns, self.rank), "V", step // self.interval, query, tensor)
        return u, v

    def same_interval(self, one: int, other: int) -> bool:
        """Whether two steps have the same V."""
        return one // self.interval == other // self.interval

    def coordinates(self, step: int, query: int, tensor: str, shape: tuple[int, ...]) -> mx.array:
        """Psi (k, N) of a tensor (M, N), where directions have a subspace."""
        rows, columns = shape
        size = (min(self.rank, rows, columns), columns)
        return self._values(size, "Psi", step, query, tensor)

    def subspace(self, step: int, tensor: str, shape: tuple[int, ...]) -> mx.array:
        """P (M, k) of a tensor (M, N), where directions have a subspace."""
        rows, columns = shape
        key = key_of(self.seed, "P", step // self.interval, tensor)
        drawn = mx.random.normal((rows, min(self.rank, rows, columns)), key=key)
        return mx.array(np.linalg.qr(np.array(drawn, np.float64))[0].astype(np.float32))

    def _values(self, shape: tuple[int, ...], *parts: int | str) -> mx.array:
        """Independent values that depend on nothing but the seed and `parts`."""
        key = key_of(self.seed, *parts)
        if self.kind == "rademacher":
            return _signs(shape, key)
        return mx.random.normal(shape, key=key)

    def member(self, step: int, query: int) -> int:
        """Which of the pool's directions a query takes, each with the same probability."""
        return number_of(self.seed, "member", step, query) % self.pool


def _signs(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """-1 or 1, each with the same probability."""
    return mx.where(mx.random.bernoulli(0.5, shape, key=key), 1.0, -1.0)
