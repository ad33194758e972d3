"""A tape of the calls that taps see when a model runs: products, attention, convolutions, layers.

Taps compute nothing. They return zeros, so that running the model shows the order of its products
and the inputs of each. Or they return given arrays, so that the computation between two products
can be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from runtime.operations.experts import Activation

MASK = "causal"  # the mask of a layer while it is cut


@dataclass(frozen=True)
class Call:
    """One call of a tap: the layer's name in the model, its inputs, and the returned array."""

    name: str
    inputs: tuple[mx.array, ...]
    output: mx.array


@dataclass(frozen=True)
class EmbeddingCall(Call):
    """A look-up of tokens, whose numbers (1, T) it reads.

    of_model: whether the embedding is outside of the layers.
    """

    of_model: bool


class PartCall(Call):
    """A part of the layer's input, which the model takes apart; the output stands for it."""


class LayerCall(Call):
    """A whole transformer layer, named by its index."""


@dataclass(frozen=True)
class LinearCall(Call):
    """A product with a weight matrix; for the head of a tied model, the embedding's."""

    bias: bool


@dataclass(frozen=True)
class AttentionCall(Call):
    """Scaled dot-product attention of (q, k, v), whose scores may be capped, or meet sinks."""

    scale: float
    cap: float | None
    sinks: mx.array | None


@dataclass(frozen=True)
class ConvolutionCall(Call):
    """A causal convolution over tokens, one filter a channel: its parameters by name."""

    parameters: dict[str, tuple[int, ...]]


class DeltaCall(Call):
    """The gated delta rule of (q, k, v, log of the decay, beta)."""


@dataclass(frozen=True)
class ExpertsCall(Call):
    """Gated MLPs, of which each token takes some: of (x, weights, numbers as floats)."""

    count: int
    activation: Activation
    biased: bool


class Tap:
    """Stands in for a module that the model calls, and does nothing else with."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{self.__dict__.get('name')} is used otherwise than by a call ({name})"
        )


class Tape:
    """The calls of one run, in order. Taps return `outputs`; without them, zeros or random values.

    drawn: whether they are random.
    """

    def __init__(self, outputs: Sequence[mx.array] | None = None, drawn: bool = False) -> None:
        self._drawn = drawn
        self.calls: list[Call] = []
        self.masks: list[Any] = []  # of attention, in layers that run as they are
        self.positions: mx.array | None = None  # (T, D), of learned positions; without it, zeros
        self.padded: list[tuple[mx.array, mx.array]] = []  # before the first token, and what it was
        self._outputs = outputs
        self._batched: dict[int, tuple[mx.array, mx.array]] = {}
        self._floats: dict[int, tuple[mx.array, mx.array]] = {}

    @property
    def replays(self) -> bool:
        """Whether the taps return given arrays."""
        return self._outputs is not None

    def output(self, shape: tuple[int, ...]) -> mx.array:
        """The array that the next call returns, of this shape."""
        if self._outputs is not None:
            return self._outputs[len(self.calls)]
        key = mx.random.key(len(self.calls))
        return mx.random.normal(shape, key=key) if self._drawn else mx.zeros(shape)

    def batched(self, x: mx.array) -> mx.array:
        """x (T, C) as (1, T, C), the same array whenever it is asked for; others as they are."""
        if x.ndim != 2:
            return x
        _, whole = self._batched.setdefault(id(x), (x, x[None]))
        return whole

    def floats(self, ids: mx.array) -> mx.array:
        """Tokens' numbers as float32, the same array whenever it is asked for."""
        _, values = self._floats.setdefault(id(ids), (ids, ids.astype(mx.float32)))
        return values

    def record(self, call: Call) -> mx.array:
        """Append a call; returns its output."""
        self.calls.append(call)
        return call.output
