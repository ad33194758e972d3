"""The reference of prefix tuning: mlx-lm's own model, with further keys and values joined on.

Every attention's keys and values get the prefix's rows before them, and its mask as many columns,
which hide nothing. All scores are in one matrix, and gradients come from MLX's autograd.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from oracles.whole_model import Row, dense_model, gradients, packed_gradients
from runtime.bundle.store import Bundle
from runtime.engine.sample import PackedRows
from runtime.methods.adapters import Adapters

Attend = Callable[..., mx.array]


class Prefixed(nn.Module):  # type: ignore[misc]
    """An attention of mlx-lm, and its prefix: keys (m, K D) and values (m, K E)."""

    current: Prefixed | None = None  # the one that attends at the moment

    def __init__(self, attention: nn.Module, keys: mx.array, values: mx.array) -> None:
        super().__init__()
        self.attention, self.prefix_keys, self.prefix_values = attention, keys, values

    def __call__(self, *arguments: Any, **named: Any) -> mx.array:
        Prefixed.current = self
        try:
            found: mx.array = self.attention(*arguments, **named)
        finally:
            Prefixed.current = None
        return found

    def joined(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Keys (1, K, m + T, D) and values (1, K, m + T, E) of k and v of T tokens."""
        parts = []
        for own, x in ((self.prefix_keys, k), (self.prefix_values, v)):
            rows = own.reshape(1, own.shape[0], x.shape[1], x.shape[3]).swapaxes(1, 2)
            parts.append(mx.concatenate([rows, x], axis=2))
        return parts[0], parts[1]


def _with_prefixes(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> Any:
    """What attends in place of mlx-lm's own: keys, values and a mask (T, m + T) of numbers."""
    length = queries.shape[2]
    distance = mx.arange(length)[:, None] - mx.arange(length)[None]
    allowed = distance >= 0 if mask is None or isinstance(mask, str) else mask
    current = Prefixed.current
    if current is not None:
        keys, values = current.joined(keys, values)
        seen = mx.ones((length, current.prefix_keys.shape[0]), mx.bool_)
        allowed = mx.concatenate([seen, allowed.reshape(length, length)], axis=1)
    return keys, values, allowed


@contextmanager
def _attending(model_type: str, attend: Attend) -> Iterator[None]:
    """Have the models of a family attend by another function than mlx-lm's."""
    name = "gemma3_text" if model_type.startswith("gemma3") else model_type
    module: Any = importlib.import_module(f"mlx_lm.models.{name}")
    plain = module.scaled_dot_product_attention
    module.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        module.scaled_dot_product_attention = plain


def _attend(
    q: mx.array, k: mx.array, v: mx.array, cache: object, scale: float, mask: Any
) -> mx.array:
    k, v, allowed = _with_prefixes(q, k, v, mask)
    repeats = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    scores = mx.where(allowed, (q @ k.swapaxes(-1, -2)) * scale, -mx.inf)
    return mx.softmax(scores, axis=-1) @ v


def prefixed_model(bundle: Bundle, adapters: Adapters) -> nn.Module:
    """mlx-lm's model with the bundle's weights, of which the prefixes alone are trained."""
    model = dense_model(bundle)
    model.freeze()
    manifest = adapters.manifest
    for layer, block in zip(model.layers, manifest.layers, strict=True):
        (name,) = manifest.adapted(block)
        pair = (adapters.tensors[full] for full in manifest.adapter_names(block, name))
        layer.self_attn = Prefixed(layer.self_attn, *pair)
    return model


def prefix_gradients(
    bundle: Bundle, adapters: Adapters, rows: Sequence[Row] | PackedRows
) -> tuple[float, dict[str, mx.array]]:
    """The mean loss, and its gradients by our names, by autograd over the whole graph."""
    model, manifest = prefixed_model(bundle, adapters), adapters.manifest
    with _attending(model.model_type, _attend):
        if isinstance(rows, PackedRows):
            loss, found = packed_gradients(model, rows)
        else:
            loss, found = gradients(model, rows)
    renamed = {}
    for block in manifest.layers:
        (name,) = manifest.adapted(block)
        for full in manifest.adapter_names(block, name):
            renamed[full] = found.pop(f"{block.name}.self_attn.{full.rpartition('.')[2]}")
    assert not found, "only prefixes are trained"
    return loss, renamed


def prefix_logits(
    bundle: Bundle, adapters: Adapters, tokens: Sequence[int]
) -> npt.NDArray[np.float32]:
    """Logits (T, V) after each token of a sequence that sees the prefixes."""
    model = prefixed_model(bundle, adapters)
    with _attending(model.model_type, _attend):
        return np.array(model(mx.array(list(tokens))[None])[0])


def keys_and_values(
    bundle: Bundle, tokens: npt.NDArray[np.int64]
) -> list[tuple[mx.array, mx.array]]:
    """Of each layer, the keys (T, K D) and values (T, K E) with which it attends to tokens (T,)."""
    seen: list[tuple[mx.array, mx.array]] = []

    def attend(
        q: mx.array, k: mx.array, v: mx.array, cache: object, scale: float, mask: Any
    ) -> mx.array:
        flat = [part[0].swapaxes(0, 1).reshape(len(tokens), -1) for part in (k, v)]
        seen.append((flat[0], flat[1]))
        return _attend(q, k, v, cache, scale, mask)

    model = dense_model(bundle)
    with _attending(model.model_type, attend):
        mx.eval(model(mx.array(tokens)[None]))
    return seen
