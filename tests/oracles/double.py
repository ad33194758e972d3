"""MLX's functions in float64, where its own round as in float32.

On a CPU `mx.exp`, `mx.sigmoid`, `mx.softmax`, `mx.sin`, `mx.cos`, `mx.erf`, `mx.fast`'s norms and
positions, and convolutions of float64 arrays are right to 1e-7 or 1e-6, and `mx.gather_mm` refuses
them. `mx.expm1`, `mx.tanh`, `mx.log1p` and products are right to 1e-15.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


@contextmanager
def computing() -> Iterator[None]:
    """Let models of MLX whose parameters are float64 compute in float64, on the CPU."""
    functions: dict[str, Any] = {
        "exp": exp,
        "sigmoid": lambda x: (1 + mx.tanh(x / 2)) / 2,
        "softmax": softmax,
        "logsumexp": logsumexp,
        "logaddexp": lambda a, b: mx.maximum(a, b) + mx.log1p(exp(-mx.abs(a - b))),
        "erf": erf,
        "conv1d": conv1d,
        "gather_mm": gather_mm,
        "float32": mx.float64,  # to which models turn arrays, for it to be precise
    }
    fast: dict[str, Any] = {
        "rms_norm": rms_norm,
        "layer_norm": layer_norm,
        "rope": rope,
        "scaled_dot_product_attention": attention,
    }
    mx.disable_compile()  # for good, as where a model's class is found
    with (
        mx.stream(mx.cpu),
        mock.patch.multiple(mx, **functions),
        mock.patch.multiple(mx.fast, **fast),
    ):
        yield


def widened(x: mx.array | np.ndarray) -> mx.array:
    """The same values as float64."""
    return _of_numpy(np.array(x, np.float64))


def exp(x: mx.array) -> mx.array:
    """e^x."""
    return mx.expm1(x) + 1


def softmax(x: mx.array, axis: int = -1, precise: bool = False) -> mx.array:
    """softmax(x) along an axis."""
    powers = exp(x - mx.stop_gradient(x.max(axis=axis, keepdims=True)))
    return powers / powers.sum(axis=axis, keepdims=True)


def logsumexp(x: mx.array, axis: int = -1) -> mx.array:
    """log(sum(e^x)) along an axis."""
    largest = mx.stop_gradient(x.max(axis=axis, keepdims=True))
    return mx.log(exp(x - largest).sum(axis=axis)) + largest.squeeze(axis)


@mx.custom_function
def erf(x: mx.array) -> mx.array:
    """The error function."""
    return _of_numpy(_erf(np.array(x)))


@erf.vjp
def _erf_vjp(x: mx.array, slope: mx.array, _: mx.array) -> mx.array:
    return slope * (2 / math.pi**0.5) * exp(-(x**2))


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x over its root mean square."""
    y = _over_root(x, eps)
    return y if weight is None else y * weight


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """x without its mean, over its standard deviation."""
    y = _over_root(x - x.mean(axis=-1, keepdims=True), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _over_root(x: mx.array, eps: float) -> mx.array:
    return x / mx.sqrt((x * x).mean(axis=-1, keepdims=True) + _number(eps))


def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int,
    freqs: mx.array | None = None,
) -> mx.array:
    """Rotary positions of x (..., T, D)."""
    half = dims // 2
    if freqs is None:
        assert base is not None
        periods = base ** (np.arange(half) / half)
    else:
        periods = np.array(freqs, np.float64)
    angles = (offset + np.arange(x.shape[-2]))[:, None] * scale / periods  # (T, half)
    cos, sin = _of_numpy(np.cos(angles)), _of_numpy(np.sin(angles))
    turning, rest = x[..., :dims], x[..., dims:]
    if traditional:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    parts = [first * cos - second * sin, first * sin + second * cos]
    if traditional:
        turned = mx.stack(parts, axis=-1).reshape(turning.shape)
    else:
        turned = mx.concatenate(parts, axis=-1)
    return mx.concatenate([turned, rest], axis=-1)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """softmax(q k^T scale + mask) v; (B, H, T, D), (B, K, T, D)."""
    repeats, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    scores = (q @ k.swapaxes(-1, -2)) * _number(scale)
    if isinstance(mask, str):
        mask = mx.array(np.tri(length, dtype=bool))
    if mask is not None:
        scores = mx.where(mask, scores, -np.inf) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        further = mx.broadcast_to(sinks[None, :, None, None], (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, further], axis=-1)
    return softmax(scores)[..., : k.shape[2]] @ v


def conv1d(
    x: mx.array, w: mx.array, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
) -> mx.array:
    """Depthwise: y (B, T', C) of x (B, T, C) by w (C, width, 1)."""
    channels, width, depth = w.shape
    assert (stride, dilation, depth) == (1, 1, 1)
    assert groups == channels
    x = mx.pad(x, [(0, 0), (padding, padding), (0, 0)])
    tokens = x.shape[1] - width + 1
    return mx.stack([x[:, at : at + tokens] * w[:, at, 0] for at in range(width)]).sum(axis=0)


def gather_mm(a: mx.array, b: mx.array, *, rhs_indices: mx.array, **_: Any) -> mx.array:
    """a @ b[rhs_indices]."""
    return a @ b[rhs_indices]


def _of_numpy(values: np.ndarray) -> mx.array:
    """In float64, to which `mx.array` does not turn NumPy's."""
    return mx.array(values.tolist(), mx.float64)


def _number(value: float) -> mx.array:
    return mx.array(value, mx.float64)
