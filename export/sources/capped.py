"""Attention whose scores are capped, which mlx-lm's classes write out, as one call of a function.

A tap can stand in for the call, as it does for MLX's own attention.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

CAP = "attn_logit_softcapping"  # an attribute of such a module


def attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any, cap: float
) -> mx.array:
    """softmax(cap tanh(q k^T scale / cap) + mask) v for q (B, H, T, D) and k, v (B, K, S, D).

    mask: (T, S), of bool or added; or None.
    """
    batch, heads, length, width = q.shape
    grouped = (q * scale).reshape(batch, k.shape[1], -1, length, width)
    scores = cap * mx.tanh(grouped @ k[:, :, None].swapaxes(-1, -2) / cap)
    if mask is not None:
        is_bool = mask.dtype == mx.bool_
        least = mx.array(mx.finfo(scores.dtype).min, scores.dtype)
        scores = mx.where(mask, scores, least) if is_bool else scores + mask
    out = mx.softmax(scores, precise=True, axis=-1) @ v[:, :, None]
    return out.reshape(batch, heads, length, -1)


class _Capped(nn.Module):  # type: ignore[misc]
    """The call of mlx-lm's own modules with capped scores, with `attention` in one place."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k, v = (
            project(x).reshape(batch, length, count, -1).transpose(0, 2, 1, 3)
            for project, count in zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
        )
        offset = 0 if cache is None else cache.offset
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = attention(q, k, v, scale=self.scale, mask=mask, cap=float(getattr(self, CAP)))
        y: mx.array = self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        return y


def install(model: Any) -> None:
    """Let the modules of one of mlx-lm's models that cap scores call `attention`."""
    for _, module in model.named_modules():
        if hasattr(module, CAP):
            module.__class__ = type(type(module).__name__, (_Capped, type(module)), {})
