"""Taps stand in for linears, attention, embedding and layers, and record what they see.

Running a model over taps shows the order of its products and what reaches each of them, without
computing any; replaying it with given outputs lets what lies between be traced.
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

from ondevice.errors import BundleError

SHORTEST_PROBE = 13


def probe_length(model: nn.Module, config: dict[str, Any]) -> int:
    """A length that no other dimension of what the model computes equals.

    Those are sizes that its configuration or parameters have, or factors of them (a matrix of
    416 rows may be 13 heads of 32), so the length is the first that divides none of these.
    """
    sizes = {value for value in config.values() if type(value) is int and value > 0}
    sizes |= {size for _, value in tree_flatten(model.parameters()) for size in value.shape}
    return next(n for n in count(SHORTEST_PROBE) if all(size % n for size in sizes if size))


@dataclass(frozen=True)
class Call:
    """What one tap saw: its inputs, what it returned, and its attributes."""

    op: str
    name: str
    inputs: tuple[mx.array, ...]
    output: mx.array
    scale: float = 0.0
    bias: bool = False


class Tape:
    """Records taps' calls; replays given outputs, or invents zeros where there are none."""

    def __init__(self, outputs: Sequence[mx.array] | None = None) -> None:
        self.calls: list[Call] = []
        self._outputs = outputs

    def call(
        self,
        op: str,
        name: str,
        inputs: tuple[mx.array, ...],
        shape: tuple[int, ...],
        **attributes: Any,
    ) -> mx.array:
        given = self._outputs
        output = mx.zeros(shape) if given is None else given[len(self.calls)]
        self.calls.append(Call(op, name, inputs, output, **attributes))
        return output


class _LinearTap:
    def __init__(self, taps: Taps, name: str, linear: nn.Linear) -> None:
        self.taps, self.name = taps, name
        self.rows = linear.weight.shape[0]
        self.bias = "bias" in linear

    def __call__(self, x: mx.array) -> mx.array:
        shape = (*x.shape[:-1], self.rows)
        return self.taps.tape.call("linear", self.name, (x,), shape, bias=self.bias)


class _EmbeddingTap:
    def __init__(self, taps: Taps, name: str, embedding: nn.Embedding) -> None:
        self.taps, self.name = taps, name
        self.rows, self.columns = embedding.weight.shape

    def __call__(self, ids: mx.array) -> mx.array:
        shape = (*ids.shape, self.columns)
        return self.taps.tape.call("embedding", self.name, (), shape)

    def as_linear(self, x: mx.array) -> mx.array:
        shape = (*x.shape[:-1], self.rows)
        return self.taps.tape.call("linear", self.name, (x,), shape)


class _LayerTap:
    def __init__(self, taps: Taps, index: int, layer: nn.Module) -> None:
        self.taps, self.index, self.layer = taps, index, layer
        self.mask: Any = None

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.mask = kwargs.pop("mask") if "mask" in kwargs else args[0]
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise BundleError(f"layer {self.index} is given more than its input and a mask")
        return self.taps.tape.call("layer", str(self.index), (x,), tuple(x.shape))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


MASK = "causal"


class Taps:
    """A model with taps in place; `tape` is what they record to at the moment.

    `probe` is the sequence length to record at, by which a length is known from a dimension.
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
        """Record to `tape`, with attention tapped, while the context lasts."""

        def attention(
            q: mx.array, k: mx.array, v: mx.array, cache: Any, scale: float, mask: Any, **rest: Any
        ) -> mx.array:
            if cache is not None or any(value is not None for value in rest.values()):
                raise BundleError(f"attention of {self.module.__name__} takes {sorted(rest)}")
            if mask is not MASK:
                raise BundleError(f"attention of {self.module.__name__} changes its mask")
            shape = (*q.shape[:-1], v.shape[-1])
            return tape.call("attention", "attention", (q, k, v), shape, scale=float(scale))

        original = self.module.scaled_dot_product_attention
        previous, self.tape = self.tape, tape
        self.module.scaled_dot_product_attention = attention  # type: ignore[attr-defined]
        try:
            yield tape
        finally:
            self.module.scaled_dot_product_attention = original  # type: ignore[attr-defined]
            self.tape = previous


def attention_windows(taps: Taps, config: dict[str, Any]) -> list[int | None]:
    """Each layer's attention window (None: full causal), read off the masks it is given."""
    sizes = [int(v) for k, v in config.items() if "window" in k and isinstance(v, int)]
    length = min(max([taps.probe, *sizes]) + 3, 8192)
    with taps.recording(Tape()):
        taps.model(mx.zeros((1, length), dtype=mx.int32))
    return [_window(tap.mask, length) for tap in taps.layer_taps]


def _window(mask: Any, length: int) -> int | None:
    if isinstance(mask, str) and mask == "causal":
        return None
    if isinstance(mask, mx.array) and mask.shape == (length, length) and mask.dtype == mx.bool_:
        window = int(mask[-1].astype(mx.int32).sum().item())  # type: ignore[arg-type]
        rows, columns = mx.arange(length)[:, None], mx.arange(length)[None]
        if mx.array_equal(mask, (rows >= columns) & (rows - columns < window)):
            return window if window < length else None
    raise BundleError("a layer's attention mask is neither causal nor a sliding window")
