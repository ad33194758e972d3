"""Models that no program can express are refused by name; factors, caps and positions are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gemma3_text, llama
from support.cuts import config_of, cut_of

from export.cut.model import cut_model
from runtime.core.errors import BundleError
from runtime.operations.embedding import Embedding
from runtime.operations.head import Head


def test_what_computes_a_token_from_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any, x: mx.array) -> mx.array:
        gate = self.gate_proj(x)
        return self.down_proj(mx.cumsum(gate, axis=1) * self.up_proj(x))

    monkeypatch.setattr(llama.MLP, "__call__", call)
    with pytest.raises(BundleError, match=r"mlp.down_proj.in of one token from other tokens"):
        cut_of("llama")


def patch_call(monkeypatch: pytest.MonkeyPatch, cls: type, wrap: Callable[..., Any]) -> None:
    original = cls.__call__
    monkeypatch.setattr(cls, "__call__", lambda self, *a, **k: wrap(self, original, *a, **k))


@pytest.mark.parametrize(("factor", "cap"), [(1.0, 30.0), (0.2, 7.0), (0.5, None)])
def test_a_factor_and_a_cap_of_logits_are_found(
    monkeypatch: pytest.MonkeyPatch, factor: float, cap: float | None
) -> None:
    def changed(self: Any, original: Any, *args: Any) -> mx.array:
        logits = original(self, *args) * factor
        return logits if cap is None else mx.tanh(logits / cap) * cap

    patch_call(monkeypatch, llama.Model, changed)
    *_, head = cut_of("llama").block_types["head"].operations
    assert isinstance(head, Head) and head.cap == cap


def test_logits_that_are_changed_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, original: Any, *args: Any) -> mx.array:
        return mx.sin(original(self, *args))

    patch_call(monkeypatch, llama.Model, changed)
    with pytest.raises(BundleError, match="changes its logits"):
        cut_of("llama")


def run_layers(
    monkeypatch: pytest.MonkeyPatch,
    embed: Callable[..., Any] = lambda model, tokens: model.embed_tokens(tokens),
    layer: Callable[..., Any] = lambda layer, h, first: layer(h, "causal", cache=None),
    last: Callable[..., Any] = lambda h, first: h,
) -> None:
    """Let Llama embed, run each layer, and pass on the last hidden state as these do."""

    def forward(self: Any, inputs: mx.array, cache: Any = None, e: Any = None) -> mx.array:
        h = first = embed(self, inputs)
        for each in self.layers:
            h = layer(each, h, first)
        return self.norm(last(h, first))

    monkeypatch.setattr(llama.LlamaModel, "__call__", forward)


def all_seen(h: mx.array) -> mx.array:
    """A mask by which each token sees the future."""
    return mx.ones((h.shape[1], h.shape[1]), mx.bool_)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer": lambda layer, h, _: layer(h, "causal", None) * 0.5}, "between layers 0 and 1"),
        ({"last": lambda h, first: h + first}, "skip past a layer"),
        ({"layer": lambda layer, h, first: layer(h, "causal", None, first)}, "more than its input"),
        ({"layer": lambda layer, h, _: layer(h, all_seen(h))}, "neither causal nor a sliding"),
    ],
    ids=["between", "skip", "two inputs", "mask"],
)
def test_layers_that_are_run_otherwise_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    original = llama.TransformerBlock.__call__

    def block(self: Any, x: mx.array, mask: Any, cache: Any = None, first: Any = None) -> mx.array:
        return original(self, x if first is None else x + first, mask, cache)

    monkeypatch.setattr(llama.TransformerBlock, "__call__", block)
    run_layers(monkeypatch, **change)
    with pytest.raises(BundleError, match=said):
        cut_of("llama")


@pytest.mark.parametrize("factor", [1.5, 1.25])
def test_an_argument_that_a_layer_can_do_without_is_left_out(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    original = llama.TransformerBlock.__call__

    def block(self: Any, x: mx.array, mask: Any, cache: Any = None, scale: Any = None) -> mx.array:
        return original(self, x * (1.5 if scale is None else scale), mask, cache)

    def layer(layer: Any, h: mx.array, _: mx.array) -> mx.array:
        return layer(h, "causal", None, factor * mx.ones((h.shape[1], 1)))

    monkeypatch.setattr(llama.TransformerBlock, "__call__", block)
    run_layers(monkeypatch, layer=layer)
    if factor == 1.5:
        assert len(cut_of("llama").blocks) > 2
        return
    with pytest.raises(BundleError, match="more than its input"):
        cut_of("llama")


@pytest.mark.parametrize("added", [True, False])
def test_learned_positions_must_be_added(monkeypatch: pytest.MonkeyPatch, added: bool) -> None:
    original = llama.LlamaModel.__init__

    def with_positions(self: Any, args: Any) -> None:
        original(self, args)
        self.positions = nn.Embedding(64, args.hidden_size)

    def positioned(self: Any, tokens: mx.array) -> mx.array:
        e, p = self.embed_tokens(tokens), self.positions(3 + mx.arange(tokens.shape[1])[None])
        return e + p if added else e * p

    monkeypatch.setattr(llama.LlamaModel, "__init__", with_positions)
    run_layers(monkeypatch, positioned)
    if added:
        lookup, *others = cut_of("llama").block_types["embed"].operations
        assert not others and isinstance(lookup, Embedding)
        assert (lookup.positions, lookup.first_position) == ("model.positions", 3)
        return
    with pytest.raises(BundleError, match="learned positions are not added"):
        cut_of("llama")


def test_attention_with_more_than_a_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def sinking(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        q = self.q_proj(x).reshape(1, x.shape[1], self.n_heads, -1).swapaxes(1, 2)
        k = self.k_proj(x).reshape(1, x.shape[1], self.n_kv_heads, -1).swapaxes(1, 2)
        out = llama.scaled_dot_product_attention(
            q, k, k, cache=None, scale=self.scale, mask=mask, sinks=mx.zeros(4)
        )
        return self.o_proj(out.swapaxes(1, 2).reshape(1, x.shape[1], -1))

    monkeypatch.setattr(llama.Attention, "__call__", sinking)
    with pytest.raises(BundleError, match="sinks"):
        cut_of("llama")


def test_a_layer_that_changes_its_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(self: Any, original: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
        return original(self, x, None, cache)

    patch_call(monkeypatch, llama.Attention, unmasked)
    with pytest.raises(BundleError, match="mask"):
        cut_of("llama")


def test_matrices_outside_linear_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = llama.MLP.__init__

    def with_router(self: Any, args: Any) -> None:
        original(self, args)
        self.router = mx.zeros((4, args.hidden_size))

    monkeypatch.setattr(llama.MLP, "__init__", with_router)
    with pytest.raises(BundleError, match="router"):
        cut_of("llama")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"head_dim": -1}),
        ("llama", {"rope_scaling": {"rope_type": "unheard of"}}),
        ("llama", {"hidden_size": "128"}),
        ("gemma3_text", {}),
        ("no_such_model", {}),
        ("../llama", {}),
        ("os", {}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("mamba", {}),
    ],
)
def test_what_cannot_run_is_a_bundle_error(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BundleError):
        cut_model(family, {"num_hidden_layers": 2, **config_of("llama"), **changes})


def test_cutting_leaves_mlx_lm_as_it_was() -> None:
    before = llama.scaled_dot_product_attention, gemma3_text.scaled_dot_product_attention, mx.tanh
    cut_of("gemma3")
    with pytest.raises(BundleError):
        cut_of("llama", hidden_size="128")
    after = llama.scaled_dot_product_attention, gemma3_text.scaled_dot_product_attention, mx.tanh
    assert after == before
    model = llama.Model(llama.ModelArgs.from_dict(config_of("llama")))
    assert model(mx.zeros((1, 5), mx.int32)).shape == (1, 5, 320)
