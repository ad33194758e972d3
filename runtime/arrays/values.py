"""Types for values, adapters and gradients by name, which kernels read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import Arrays
from runtime.arrays.dropout import Dropout, DropoutMask
from runtime.arrays.stored import Matrix


@dataclass(frozen=True)
class InputObserver:
    """Sees the inputs of a matrix: the first `tokens` of each sequence, without its padding."""

    see: Callable[[mx.array], None]  # takes x (T, C)
    tokens: int

    def __call__(self, x: mx.array) -> None:
        if self.tokens:
            self.see(x[: self.tokens])

    def after(self, tokens: int) -> InputObserver:
        """The observer for what follows so many tokens."""
        return InputObserver(self.see, max(0, self.tokens - tokens))


@dataclass(frozen=True)
class Lora:
    """An adapter of one matrix: a (C, r), b (r, R), and the factor s of its output.

    Of an attention it is a prefix: a (m, K D) has the keys of m rows, b (m, K E) their values.
    `dropout` is None except in training, and `observer` except where inputs themselves are sought.
    """

    a: mx.array
    b: mx.array
    scale: float
    dropout: Dropout | None = None
    observer: InputObserver | None = None

    def mask(self, x: mx.array) -> DropoutMask | None:
        """Which values of the input x (T, C) are dropped; None without dropout."""
        return None if self.dropout is None else self.dropout.mask(*x.shape)

    def after(self, tokens: int) -> Lora:
        """The adapter for what follows so many tokens."""
        if self.dropout is None and self.observer is None:
            return self
        dropout = None if self.dropout is None else self.dropout.after(tokens)
        observer = None if self.observer is None else self.observer.after(tokens)
        return replace(self, dropout=dropout, observer=observer)


Loras = dict[str, Lora]


class Move(Protocol):
    """Moves the weights themselves, for methods that train all parameters: W + sign epsilon z."""

    def vector(self, name: str, value: mx.array) -> mx.array:
        """A vector (N,) by full name, moved and evaluated."""

    def tile(self, matrix: Matrix, start: int, values: mx.array) -> mx.array:
        """Rows (R, C) of a matrix in floating point, from row `start` on, moved and evaluated."""

    def rows(self, matrix: Matrix, chosen: npt.NDArray[np.int64], values: mx.array) -> mx.array:
        """Chosen rows (N, C) of a matrix in floating point, moved and evaluated."""


class Moved(Loras):
    """A batch lane's replacement for adapters where the weights themselves are moved."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        self.move = move


def move_of(loras: Loras) -> Move | None:
    """How a batch lane moves the weights; None if it runs with the weights as they are."""
    return loras.move if isinstance(loras, Moved) else None


Gradients = dict[str, tuple[mx.array, mx.array]]  # (da, db) of each Lora, by its relative name
Values = dict[str, mx.array]


def accumulate(total: Gradients, fresh: Gradients, arrays: Arrays) -> None:
    """Add the gradients `fresh` to existing ones, evaluated; `fresh` is emptied."""
    while fresh:
        name, pair = fresh.popitem()
        if name in total:
            before = total.pop(name)
            pair = (before[0] + pair[0], before[1] + pair[1])
            del before  # so that there is no other reference to the summands
            arrays.settle(pair)
        total[name] = pair
