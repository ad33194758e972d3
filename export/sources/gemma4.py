"""Gemma 4, as mlx-lm computes it, with layers that are given one array and return one.

mlx-lm's layers are given a slice of a second embedding besides, and the last ones the keys and
values of an earlier layer. Here what a layer reads is in its input: the columns of the hidden
state, then the token's number, then keys and values that later layers share. So a layer's gradient
with respect to its input is that of shared keys and values, too. Each layer has the columns of the
second embedding, and the rows of its projection, that are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.gemma4_text import ModelArgs as ModelArgs

from export.sources.stream import Stream

HIDDEN, TOKEN = "hidden", "token"
TABLE = "embed_tokens_per_layer"
_OF_LAYERS = {TABLE: -1, "per_layer_model_projection": 0}  # the axis of which each has a part
_NORM = "per_layer_projection_norm"


def sources(args: ModelArgs) -> list[int | None]:
    """For each layer the earlier one whose keys and values it reads; None for its own."""
    own = args.num_hidden_layers - args.num_kv_shared_layers
    last = {args.layer_types[index]: index for index in range(own)}
    shared = [last[kind] for kind in args.layer_types[own:]]
    return [*([None] * own), *shared]


def streams(args: ModelArgs) -> list[Stream]:
    """What each layer takes, and what the last one returns: as little as later layers need."""
    reads = sources(args)

    def widths(index: int) -> Iterator[tuple[str, int]]:
        yield HIDDEN, args.hidden_size
        if args.hidden_size_per_layer_input and index < len(reads):
            yield TOKEN, 1
        for source in sorted(
            {layer for layer in reads[index:] if layer is not None and layer < index}
        ):
            width = _key_values(args, source)
            yield from ((f"keys{source}", width), (f"values{source}", width))

    return [Stream(tuple(widths(index))) for index in range(len(reads) + 1)]


def _key_values(args: ModelArgs, index: int) -> int:
    """How many values a layer's keys have, over all heads; its values have as many."""
    full = args.layer_types[index] == "full_attention"
    heads = args.num_key_value_heads
    if full and args.attention_k_eq_v and args.num_global_key_value_heads is not None:
        heads = args.num_global_key_value_heads
    return int(heads * (args.global_head_dim if full and args.global_head_dim else args.head_dim))


class Experts(gemma4_text.Experts):  # type: ignore[misc]
    """mlx-lm's experts, whose results stand first in their product with the weights."""

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        weighted: mx.array = self.switch_glu(x, chosen) * weights[..., None]
        return weighted.sum(-2)


class Layer(gemma4_text.DecoderLayer):  # type: ignore[misc]
    """mlx-lm's layer, which takes a `Stream` and returns the next."""

    def __init__(self, args: ModelArgs, index: int, embed: Callable[[mx.array], mx.array]) -> None:
        super().__init__(args, layer_idx=index)
        self.source = sources(args)[index]
        self.takes, self.returns = streams(args)[index : index + 2]
        self.returned_columns = self.returns.columns
        self.embed = embed
        if args.enable_moe_block:
            self.experts = Experts(args)
        width, own = args.hidden_size, args.hidden_size_per_layer_input
        if own:
            self.embed_tokens_per_layer = nn.Embedding(args.vocab_size_per_layer_input, own)
            self.per_layer_model_projection = nn.Linear(width, own, bias=False)
            self.per_layer_projection_norm = nn.RMSNorm(own, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        parts = self.takes.split(x)
        shared = None
        if self.source is not None:
            shared = tuple(
                _by_head(parts[f"{name}{self.source}"], self.self_attn.n_kv_heads)
                for name in ("keys", "values")
            )
        hidden, (keys, values), _ = super().__call__(
            parts[HIDDEN],
            mask,
            cache,
            self._own_input(parts),
            shared,
            0 if cache is None else cache.offset,
        )
        parts |= {f"keys{self.layer_idx}": _flat(keys), f"values{self.layer_idx}": _flat(values)}
        return self.returns.join({**parts, HIDDEN: hidden})

    def _own_input(self, parts: dict[str, mx.array]) -> mx.array | None:
        """The layer's input besides the hidden state: of the second embedding and the first."""
        if TOKEN not in parts:
            return None
        tokens = mx.stop_gradient(parts[TOKEN].squeeze(-1).astype(mx.int32))
        table, projection = self.embed_tokens_per_layer, self.per_layer_model_projection
        own, width = self.config.hidden_size_per_layer_input, self.config.hidden_size
        projected = projection(self.embed(tokens) * width**0.5) * width**-0.5
        looked_up = table(tokens) * own**0.5
        y: mx.array = (self.per_layer_projection_norm(projected) + looked_up) * 2.0**-0.5
        return y


def _flat(heads: mx.array) -> mx.array:
    """(1, K, T, D) as (1, T, K D)."""
    return heads.transpose(0, 2, 1, 3).flatten(2)


def _by_head(x: mx.array, heads: int) -> mx.array:
    """(1, T, K D) as (1, K, T, D)."""
    return mx.unflatten(x, -1, (heads, -1)).transpose(0, 2, 1, 3)


class Inner(nn.Module):  # type: ignore[misc]
    """The embedding, the layers and the norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.first = args, streams(args)[0]
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [
            Layer(args, index, lambda tokens: self.embed_tokens(tokens))
            for index in range(args.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed_tokens(tokens) * self.args.hidden_size**0.5
        x = self.first.join({HIDDEN: hidden, TOKEN: tokens[..., None].astype(mx.float32)})
        windows = {"sliding_attention": self.args.sliding_window, "full_attention": None}
        masks = {
            kind: create_attention_mask(hidden, None, window_size=window)
            for kind, window in windows.items()
        }
        for layer in self.layers:
            x = layer(x, masks[layer.layer_type], None)
        y: mx.array = self.norm(x)
        return y


class Model(gemma4_text.Model):  # type: ignore[misc]
    """Gemma 4's text model with its head."""

    def __init__(self, args: ModelArgs) -> None:
        nn.Module.__init__(self)
        self.args, self.model_type = args, args.model_type
        self.model = Inner(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Logits (B, T, V) of tokens (B, T)."""
        x = self.model(tokens)
        tied, cap = self.args.tie_word_embeddings, self.args.final_logit_softcapping
        logits: mx.array = self.model.embed_tokens.as_linear(x) if tied else self.lm_head(x)
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The tensors of a checkpoint by the names here, where each layer has its own part."""
        made: dict[str, mx.array] = {}
        count = self.args.num_hidden_layers
        for name, value in super().sanitize(weights).items():
            module, _, last = name.removeprefix("model.").rpartition(".")
            if module in _OF_LAYERS:
                parts = list(mx.split(value, count, axis=_OF_LAYERS[module]))
            elif module == _NORM:
                parts = [value] * count
            else:
                made[name] = value
                continue
            made |= {f"model.layers.{i}.{module}.{last}": part for i, part in enumerate(parts)}
        return made

    def whole(self) -> dict[str, tuple[list[str], int | None]]:
        """The checkpoint's tensors of which layers have parts: the parts' names, and their axis.

        Where there is no axis, every part is the whole.
        """
        if not self.args.hidden_size_per_layer_input:
            return {}
        axes: dict[str, int | None] = {**_OF_LAYERS, _NORM: None}
        layers = [f"model.layers.{index}" for index in range(self.args.num_hidden_layers)]
        return {
            f"model.{module}.weight": ([f"{layer}.{module}.weight" for layer in layers], axis)
            for module, axis in axes.items()
        }
