"""Taps: stand-ins for a model's embedding, linear layers, attention and transformer layers.

A tap computes nothing. It records its inputs and returns zeros, so that running the model shows the
order of its products and the inputs of each. Or it returns given arrays, so that the
computation between two products can be traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from runtime.core.errors import BundleError

SHORTEST_PROBE = 13


def probe_length(model: nn.Module, config: dict[str, Any]) -> int:
    """A sequence length that differs from every other dimension of an array in the model.

    Other dimensions are sizes in its configuration or parameters, or factors of them (a matrix of
    416 rows may be 13 heads of 32). So the length is the smallest that divides none of these.
    """
    sizes = {value for value in config.values() if type(value) is int and value > 0}
    sizes |= {size for _, value in tree_flatten(model.parameters()) for size in value.shape}
    return next(n for n in count(SHORTEST_PROBE) if all(size % n for size in sizes if size))


@dataclass(frozen=True)
class Call:
    """One call of a tap: the layer's name in the model, its inputs, and the returned array."""

    name: str
    inputs: tuple[mx.array, ...]
    output: mx.array


class EmbeddingCall(Call):
    """A look-up of tokens; it has no inputs, since token ids are not activations."""


class LayerCall(Call):
    """A whole transformer layer, named by its index."""


@dataclass(frozen=True)
class LinearCall(Call):
    """A product with a weight matrix; for the head of a tied model, the embedding's."""

    bias: bool


@dataclass(frozen=True)
class AttentionCall(Call):
    """Scaled dot-product attention of (q, k, v)."""

    scale: float


class Tape:
    """The calls of one run, in order. Taps return `outputs`; without them, zeros."""

    def __init__(self, outputs: Sequence[mx.array] | None = None) -> None:
        self.calls: list[Call] = []
        self._outputs = outputs

    def output(self, shape: tuple[int, ...]) -> mx.array:
        """The array that the next call returns, of this shape."""
        return mx.zeros(shape) if self._outputs is None else self._outputs[len(self.calls)]

    def record(self, call: Call) -> mx.array:
        """Append a call; returns its output."""
        self.calls.append(call)
        return call.output


class _LinearTap:
    """Stands in for a linear layer."""

    def __init__(self, taps: Taps, name: str, linear: nn.Linear) -> None:
        self.taps, self.name = taps, name
        self.rows = linear.weight.shape[0]
        self.bias = "bias" in linear

    def __call__(self, x: mx.array) -> mx.array:
        tape = self.taps.tape
        output = tape.output((*x.shape[:-1], self.rows))
        return tape.record(LinearCall(self.name, (x,), output, self.bias))


class _EmbeddingTap:
    """Stands in for an embedding, which a tied model also uses as its head."""

    def __init__(self, taps: Taps, name: str, embedding: nn.Embedding) -> None:
        self.taps, self.name = taps, name
        self.rows, self.columns = embedding.weight.shape

    def __call__(self, ids: mx.array) -> mx.array:
        tape = self.taps.tape
        return tape.record(EmbeddingCall(self.name, (), tape.output((*ids.shape, self.columns))))

    def as_linear(self, x: mx.array) -> mx.array:
        tape = self.taps.tape
        output = tape.output((*x.shape[:-1], self.rows))
        return tape.record(LinearCall(self.name, (x,), output, bias=False))


class _LayerTap:
    """Stands in for a transformer layer, remembers its mask, and else is that layer."""

    def __init__(self, taps: Taps, index: int, layer: nn.Module) -> None:
        self.taps, self.index, self.layer = taps, index, layer
        self.mask: Any = None

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.mask = kwargs.pop("mask") if "mask" in kwargs else args[0]
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise BundleError(
                f"layer {self.index} is given more than its input and a mask; such models are not "
                "supported"
            )
        tape = self.taps.tape
        return tape.record(LayerCall(str(self.index), (x,), tape.output(tuple(x.shape))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


MASK = "causal"  # the mask of a layer while it is cut


@dataclass(frozen=True)
class Position:
    """Stands in for a cache of keys and values: the position, and keys and values as they are."""

    offset: mx.array  # the position of the first token, an int32

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The new keys and values alone."""
        return keys, values


class Taps:
    """A model with its taps in place, which record to the current `tape`.

    `probe` is the sequence length to run the model at: no other dimension has this size, so an axis
    of it is the tokens'.
    """

    def __init__(self, module: ModuleType, model: nn.Module, probe: int) -> None:
        self.module, self.model, self.probe = module, model, probe
        self.tape = Tape()
        self.inner = model.model
        self.layers = list(self.inner.layers)
        for layer in self.layers:
            self._tap(layer)
        self.layer_taps = [_LayerTap(self, i, layer) for i, layer in enumerate(self.layers)]
        self.inner.layers = self.layer_taps
        self._tap(model)

    def _tap(self, root: nn.Module) -> None:
        makers = {nn.Linear: _LinearTap, nn.Embedding: _EmbeddingTap}
        parents = dict(root.named_modules())
        for path, child in list(parents.items()):
            maker = makers.get(type(child))
            if maker is not None:
                parent, _, attribute = path.rpartition(".")
                setattr(parents[parent], attribute, maker(self, path, child))

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[Tape]:
        """Record to `tape`, with mlx-lm's attention replaced by a tap, inside the `with` block."""

        def attention(
            q: mx.array, k: mx.array, v: mx.array, cache: Any, scale: float, mask: Any, **rest: Any
        ) -> mx.array:
            has_no_keys = cache is None or isinstance(cache, Position)
            if not has_no_keys or any(value is not None for value in rest.values()):
                raise BundleError(
                    f"attention of {self.module.__name__} takes {sorted(rest)} besides q, k, v, "
                    "scale and mask; such models are not supported"
                )
            if mask is not MASK:
                raise BundleError(
                    f"attention of {self.module.__name__} is given another mask than its layer; "
                    "such models are not supported"
                )
            output = tape.output((*q.shape[:-1], v.shape[-1]))
            return tape.record(AttentionCall("attention", (q, k, v), output, float(scale)))

        original = self.module.scaled_dot_product_attention
        previous, self.tape = self.tape, tape
        self.module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
        try:
            yield tape
        finally:
            self.module.scaled_dot_product_attention = original  # type: ignore[attr-defined]
            self.tape = previous


def attention_windows(taps: Taps, config: dict[str, Any]) -> list[int | None]:
    """Each layer's attention window in tokens, from the mask that it is given; None: no window."""
    sizes = [int(v) for k, v in config.items() if "window" in k and isinstance(v, int)]
    length = min(max([taps.probe, *sizes]) + 3, 8192)
    with taps.recording(Tape()):
        taps.model(mx.zeros((1, length), dtype=mx.int32))
    return [_window(tap, length) for tap in taps.layer_taps]


def _window(tap: _LayerTap, length: int) -> int | None:
    mask = tap.mask
    if isinstance(mask, str) and mask == "causal":
        return None
    if isinstance(mask, mx.array) and mask.shape == (length, length) and mask.dtype == mx.bool_:
        window = int(mask[-1].astype(mx.int32).sum().item())  # type: ignore[arg-type]
        rows, columns = mx.arange(length)[:, None], mx.arange(length)[None]
        if mx.array_equal(mask, (rows >= columns) & (rows - columns < window)):
            return window if window < length else None
    raise BundleError(
        f"the attention mask of layer {tap.index} is neither causal nor a sliding window; such "
        "models are not supported"
    )
