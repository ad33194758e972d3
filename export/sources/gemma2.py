"""Gemma 2 with the windows of its layers, which mlx-lm's class passes over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import gemma2
from mlx_lm.models.base import create_attention_mask

from export.sources.windows import SLIDING


@dataclass
class ModelArgs(gemma2.ModelArgs):  # type: ignore[misc]
    """mlx-lm's settings, the width of the windows, and which layers have one."""

    sliding_window: int | None = None
    layer_types: list[str] | None = None


class Inner(gemma2.GemmaModel):  # type: ignore[misc]
    """The embedding, the layers, each with its mask, and the norm."""

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(tokens) * self.args.hidden_size**0.5
        caches = cache or [None] * len(self.layers)
        whole = create_attention_mask(h, caches[0], return_array=True)
        window = self.args.sliding_window
        near = create_attention_mask(h, caches[0], window_size=window, return_array=True)
        kinds = self.args.layer_types or [""] * len(self.layers)
        for layer, kind, own in zip(self.layers, kinds, caches, strict=True):
            h = layer(h, near if kind == SLIDING else whole, own)
        y: mx.array = self.norm(h)
        return y


class Model(gemma2.Model):  # type: ignore[misc]
    """The model with its head."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.model = Inner(args)
