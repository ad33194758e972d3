"""OPT (Zhang et al. 2022), the models of MeZO's tables, as transformers computes them.

mlx-lm has no class for it. The modules have the names of transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask

FIRST_POSITION = 2  # the row of the first token's position; those before are never used


@dataclass
class ModelArgs(BaseModelArgs):  # type: ignore[misc]
    """The settings, by transformers' names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    ffn_dim: int
    max_position_embeddings: int
    word_embed_proj_dim: int | None = None
    activation_function: str = "relu"
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        width = self.word_embed_proj_dim or self.hidden_size
        if width != self.hidden_size:
            raise ValueError(
                f"embeddings of {width} values (word_embed_proj_dim) in a model of "
                f"{self.hidden_size}, as of OPT 350M, are not supported"
            )
        if self.activation_function not in ("relu", "gelu"):
            raise ValueError(f"activation_function {self.activation_function!r} is not supported")


class Attention(nn.Module):  # type: ignore[misc]
    """Attention without positions of its own."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        width, bias = args.hidden_size, args.enable_bias
        self.heads = args.num_attention_heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, width = x.shape
        q, k, v = (
            project(x).reshape(batch, length, self.heads, -1).transpose(0, 2, 1, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        scale = (width // self.heads) ** -0.5
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        y: mx.array = self.out_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, width))
        return y


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and an MLP, with norms before them, or after their residual sums."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        width, affine = args.hidden_size, args.layer_norm_elementwise_affine
        self.before = args.do_layer_norm_before
        self.activation = args.activation_function
        self.self_attn = Attention(args)
        self.self_attn_layer_norm = nn.LayerNorm(width, affine=affine)
        self.fc1 = nn.Linear(width, args.ffn_dim, bias=args.enable_bias)
        self.fc2 = nn.Linear(args.ffn_dim, width, bias=args.enable_bias)
        self.final_layer_norm = nn.LayerNorm(width, affine=affine)

    def _mlp(self, x: mx.array) -> mx.array:
        activate = nn.relu if self.activation == "relu" else nn.gelu
        y: mx.array = self.fc2(activate(self.fc1(x)))
        return y

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        first, second = self.self_attn_layer_norm, self.final_layer_norm
        if self.before:
            x = x + self.self_attn(first(x), mask, cache)
            return x + self._mlp(second(x))
        x = first(x + self.self_attn(x, mask, cache))
        y: mx.array = second(x + self._mlp(x))
        return y


class Decoder(nn.Module):  # type: ignore[misc]
    """Embeddings of tokens and positions, the layers, and a norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        rows = args.max_position_embeddings + FIRST_POSITION
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.embed_positions = nn.Embedding(rows, args.hidden_size)
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]
        if args.do_layer_norm_before:
            self.final_layer_norm = nn.LayerNorm(
                args.hidden_size, affine=args.layer_norm_elementwise_affine
            )

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        cache = cache or [None] * len(self.layers)
        first = FIRST_POSITION + (0 if cache[0] is None else cache[0].offset)
        x = self.embed_tokens(tokens) + self.embed_positions(first + mx.arange(tokens.shape[1]))
        mask = create_attention_mask(x, cache[0])
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, mask, own)
        y: mx.array = self.final_layer_norm(x) if "final_layer_norm" in self else x
        return y


class Inner(nn.Module):  # type: ignore[misc]
    """The decoder, under transformers' name."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.decoder = Decoder(args)


class Model(nn.Module):  # type: ignore[misc]
    """OPT with its head, as classes of mlx-lm are."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Inner(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        """Logits (B, T, V) of tokens (B, T)."""
        x = self.model.decoder(tokens, cache)
        tied = self.args.tie_word_embeddings
        logits: mx.array = self.model.decoder.embed_tokens.as_linear(x) if tied else self.lm_head(x)
        return logits

    @property
    def layers(self) -> list[Layer]:
        """The layers, as mlx-lm asks for them."""
        layers: list[Layer] = self.model.decoder.layers
        return layers
