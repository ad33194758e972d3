"""Cutting models into programs: what is shared, what is kept apart, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen2
from model_types.tiny import tiny
from support.cuts import config_of, cut_of, elementwise_of
from support.models import BUCKETS, FAMILIES, each_family

from export.cut.model import cut_model
from export.sources.families import normalise_config
from runtime.bundle.store import Bundle
from runtime.operations.attention import Attention
from runtime.operations.elementwise import Elementwise
from runtime.operations.embedding import Embedding
from runtime.operations.head import Head
from runtime.operations.linear import Linear
from runtime.operations.program import BlockType
from runtime.operations.values import T, graph_key, shape_at
from runtime.storage.weights import Weights

Tiny = Callable[..., Bundle]


def linears_of(block_type: BlockType) -> list[Linear]:
    return [op for op in block_type.operations if isinstance(op, Linear)]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_equal_layers_share_a_block_type(family: str) -> None:
    cut = cut_of(family, num_hidden_layers=5)
    assert [block.type for block in cut.blocks] == ["embed", *["layer0"] * 5, "head"]
    assert [block.name for block in cut.blocks[1:-1]] == [f"model.layers.{i}" for i in range(5)]
    assert set(cut.block_types) == {"embed", "layer0", "head"}
    names = [graph.operation.graph for graph in cut.graphs]
    assert len(set(names)) == len(names)
    types = cut.block_types.values()
    assert set(names) == {one.graph for of in types for one in elementwise_of(of)}


def test_gemmas_local_and_global_layers_have_block_types_of_their_own() -> None:
    cut = cut_of("gemma3", num_hidden_layers=6, sliding_window_pattern=3)
    types = [block.type for block in cut.blocks[1:-1]]
    assert types == ["layer0", "layer0", "layer1"] * 2
    windows = {
        name: [one.window for one in block_type.operations if isinstance(one, Attention)]
        for name, block_type in cut.block_types.items()
    }
    assert windows == {"embed": [], "layer0": [16], "layer1": [None], "head": []}


def test_layers_that_differ_in_their_rope_or_window_alone_are_kept_apart() -> None:
    wide = {"sliding_window": 1 << 20, "num_hidden_layers": 4}  # every layer sees everything
    apart = cut_of("gemma3", **wide, rope_local_base_freq=1e4)
    assert [block.type for block in apart.blocks[1:-1]] == ["layer0", "layer1"] * 2
    same = cut_of("gemma3", **wide, rope_local_base_freq=1e6)
    assert [block.type for block in same.blocks[1:-1]] == ["layer0"] * 4
    by_window = cut_of("gemma3", num_hidden_layers=4, rope_local_base_freq=1e6)
    assert [block.type for block in by_window.blocks[1:-1]] == ["layer0", "layer1"] * 2


def test_layers_that_differ_in_their_gradients_alone_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(layer: nn.Module, x: mx.array, mask: mx.array, cache: object = None) -> mx.array:
        h = x + layer.self_attn(layer.input_layernorm(x), mask, cache)
        normed = layer.post_attention_layernorm(h)
        return h + layer.mlp(mx.stop_gradient(normed) if id(layer) in stopped else normed)

    def init(layer: nn.Module, args: object) -> None:
        made(layer, args)
        if len(layers) % 2:
            stopped.add(id(layer))
        layers.append(layer)

    layers: list[nn.Module] = []
    stopped: set[int] = set()
    made = qwen2.TransformerBlock.__init__
    monkeypatch.setattr(qwen2.TransformerBlock, "__init__", init)
    monkeypatch.setattr(qwen2.TransformerBlock, "__call__", call)
    cut = cut_of("qwen2", num_hidden_layers=4, rope_theta=12_345.0)  # as no other test cuts
    assert [block.type for block in cut.blocks[1:-1]] == ["layer0", "layer1"] * 2


def test_only_the_embeddings_own_graph_scales_it(rng: np.random.Generator) -> None:
    plain, cut = cut_of("llama"), cut_of("gemma3")
    assert [type(one) for one in plain.block_types["embed"].operations] == [Embedding]
    scaled = [type(one) for one in cut.block_types["embed"].operations]
    assert scaled == [Embedding, Elementwise]
    (graph,) = (one for one in cut.graphs if one.operation.graph == "embed.0")
    e = mx.array(rng.standard_normal((1, 20, 128)).astype(np.float32))
    (x,) = graph.functions["forward"].call(e + 0)
    assert mx.allclose(x, e * 128**0.5, rtol=1e-2)  # Gemma rounds the factor to bfloat16
    assert not mx.allclose(x, e)
    (graph,) = (
        one for one in cut_of("gemma3", rms_norm_eps=0.3).graphs if one.operation.graph == "head.0"
    )
    weight = mx.array(rng.standard_normal(128).astype(np.float32))
    (h,) = graph.functions["forward"].call(e + 0, weight)
    assert mx.allclose(h, mx.fast.rms_norm(e, 1 + weight, 0.3), atol=1e-6)


def test_products_of_the_same_input_are_one_operation() -> None:
    operations = linears_of(cut_of("llama").block_types["layer0"])
    products = [[linear.name for linear in one.linears] for one in operations]
    assert products == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    operations = linears_of(cut_of("qwen2").block_types["layer0"])
    biases = [linear.bias for one in operations for linear in one.linears]
    assert biases == [True] * 3 + [False] * 4


@pytest.mark.parametrize(("tied", "head"), [(True, "model.embed_tokens"), (False, "lm_head")])
def test_a_tied_head_multiplies_the_embedding(tied: bool, head: str) -> None:
    cut = cut_of("llama", tie_word_embeddings=tied)
    first, last = cut.block_types["embed"].operations[0], cut.block_types["head"].operations[-1]
    assert isinstance(first, Embedding) and first.matrix == "model.embed_tokens"
    assert isinstance(last, Head) and last.matrix == head


@each_family
def test_vjps_do_not_ask_for_what_they_do_not_read(family: str) -> None:
    found = set()
    for block_type in cut_of(family).block_types.values():
        for operation in elementwise_of(block_type):
            found.add(operation.graph)
            if operation.graph == "layer0.5":
                gemma = family == "gemma3"  # a norm reads what it normed; a sum reads nothing
                assert ("mlp.down_proj.out" in operation.vjp_inputs) == gemma
                assert "x" not in operation.vjp_inputs
            assert not {name for name in operation.vjp_outputs if name[0] in "@~"}
    assert "layer0.5" in found


@each_family
def test_a_sum_hands_its_gradient_on(family: str) -> None:
    types = cut_of(family).block_types.values()
    graphs = {one.graph: one for block_type in types for one in elementwise_of(block_type)}
    after = dict(zip(graphs["layer0.5"].vjp_outputs, graphs["layer0.5"].vjp_same, strict=True))
    middle = dict(zip(graphs["layer0.3"].vjp_outputs, graphs["layer0.3"].vjp_same, strict=True))
    gemma = family == "gemma3"  # which norms what it adds
    assert after == {
        "x": "~out",
        "self_attn.o_proj.out": "" if gemma else "~out",
        "mlp.down_proj.out": "" if gemma else "~out",
    }
    assert middle == {"x": "", "self_attn.o_proj.out": "" if gemma else "x"}
    activation = graphs["layer0.4"]
    assert activation.vjp_outputs == ("mlp.gate_proj.out", "mlp.up_proj.out")
    assert activation.vjp_same == ("", "")


@each_family
def test_graphs_hold_no_weights_and_do_not_grow(tiny: Tiny, family: str) -> None:
    bundle = tiny(family)
    manifest = bundle.manifest
    weights = Weights(bundle)
    norms = [np.array(weights.vector(name)).tobytes() for name in manifest.vectors]
    scales = [np.array(weights.vector(name) + 1).tobytes() for name in manifest.vectors]
    total = 0
    for graph in manifest.graphs.values():
        blob = (bundle.path / graph.file).read_bytes()
        assert len(blob) == graph.nbytes < 16_000
        total += len(blob)
        assert not any(vector in blob for vector in norms + scales)
    assert total < 1_000_000
    for key, graph in manifest.graphs.items():
        stem, _, bucket = key.rpartition(".")
        if int(bucket) == BUCKETS[0] and not stem.endswith(
            "decode"
        ):  # no mask, no table of angles: a longer one is no larger
            assert abs(manifest.graphs[f"{stem}.{BUCKETS[-1]}"].nbytes - graph.nbytes) < 64


@each_family
def test_serialized_graphs_compute_what_was_traced(
    tiny: Tiny, rng: np.random.Generator, family: str
) -> None:
    bundle = tiny(family)
    for traced in cut_of(family).graphs:
        for direction, function in traced.functions.items():
            graph = bundle.manifest.graphs[f"{traced.operation.graph}.{direction}.16"]
            arrays = [
                mx.array(rng.standard_normal(shape_at(shape, 16)).astype(np.float32))
                for shape in function.shapes
            ]
            if function.positioned:
                arrays.append(mx.array(int(rng.integers(1 << 15)), mx.int32))
            assert tuple(tuple(array.shape) for array in arrays) == graph.inputs
            found = mx.import_function(str(bundle.path / graph.file))(*arrays)
            expected = function.call(*arrays)
            assert tuple(tuple(result.shape) for result in found) == graph.outputs
            for mine, theirs in zip(found, expected, strict=True):
                assert mx.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


@each_family
def test_what_rotates_queries_and_keys_takes_a_position(family: str) -> None:
    for name, block_type in cut_of(family).block_types.items():
        placed = [one.outputs for one in elementwise_of(block_type) if one.position]
        queries = [one.inputs for one in block_type.operations if isinstance(one, Attention)]
        assert placed == queries or name in ("embed", "head")


@each_family
def test_parts_of_a_sequence_are_computed_as_the_whole(
    tiny: Tiny, rng: np.random.Generator, family: str
) -> None:
    """A sequence of 64 in chunks of 16 and single tokens, by graphs as they were written."""
    bundle = tiny(family)
    graphs = bundle.manifest.graphs
    for block_type in bundle.manifest.block_types.values():
        for operation in elementwise_of(block_type):
            values = block_type.values

            def run(direction: str, arrays: list[mx.array], tokens: int) -> list[mx.array]:
                graph = graphs[graph_key(operation.graph, direction, tokens)]  # noqa: B023
                return list(mx.import_function(str(bundle.path / graph.file))(*arrays))

            given = {
                name: mx.array(
                    rng.standard_normal(
                        block_type.parameters[name[1:]]
                        if name[0] == "@"
                        else shape_at(values[name], 64)
                    ).astype(np.float32)
                )
                for name in operation.inputs
            }
            first = [mx.array(0, mx.int32)] if operation.placed else []
            whole = run("forward", [*given.values(), *first], 64)
            for start, tokens in ((0, 16), (16, 1), (17, 16), (33, 1)):
                part = slice(start, start + tokens)
                arrays = [
                    array if name[0] == "@" else mx.take(array, mx.arange(*part.indices(64)), axis)
                    for name, array in given.items()
                    for axis in [values[name].index(T) if name[0] != "@" else 0]
                ]
                if operation.position:
                    arrays.append(mx.array(start, mx.int32))
                found = run(operation.decoding_direction, arrays, tokens)
                for name, mine, theirs in zip(operation.outputs, found, whole, strict=True):
                    axis = values[name].index(T)
                    expected = mx.take(theirs, mx.arange(*part.indices(64)), axis)
                    assert mx.allclose(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "gelu"), [("gelu", nn.gelu), ("gelu_pytorch_tanh", nn.gelu_approx)]
)
def test_a_gelu_is_the_one_that_the_configuration_names(
    rng: np.random.Generator, name: str, gelu: Callable[[mx.array], mx.array]
) -> None:
    """GPT-NeoX's class has the one with a tanh, whatever its configuration says."""
    config = normalise_config(tiny("gpt_neox", hidden_act=name), "x", has_lm_head=False)
    (graph,) = (
        one
        for one in cut_model("gpt_neox", config).graphs
        if one.operation.inputs == ("mlp.dense_h_to_4h.out",)
    )
    x = mx.array(rng.standard_normal((1, 20, 256)).astype(np.float32))
    (found,) = graph.functions["forward"].call(x)
    assert mx.abs(found - gelu(x)).max() < 1e-6


def test_shapes_are_symbolic_in_the_length_alone() -> None:
    for family in (*FAMILIES, "qwen3"):
        for block_type in cut_of(family).block_types.values():
            assert all(shape.count(T) == 1 for shape in block_type.values.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 13, "num_key_value_heads": 13, "head_dim": 32},
        {"num_attention_heads": 26, "num_key_value_heads": 13, "head_dim": 32},
        {"head_dim": 26},
        {"hidden_size": 13, "head_dim": 16},
        {"intermediate_size": 13},
        {"vocab_size": 13},
    ],
    ids=repr,
)
def test_a_dimension_of_any_size_is_told_from_the_length(changes: dict[str, int]) -> None:
    config = config_of("llama", **changes)
    cut = cut_of("llama", **changes)
    values = cut.block_types["layer0"].values
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    assert values["x"] == values["out"] == (1, T, config["hidden_size"])
    assert values["mlp.up_proj.out"] == (1, T, config["intermediate_size"])
    assert values["attention0.q"] == (1, config["num_attention_heads"], T, size)
    assert values["attention0.k"] == (1, config["num_key_value_heads"], T, size)
    of_graph = {
        one.graph: (one, block_type)
        for block_type in cut.block_types.values()
        for one in elementwise_of(block_type)
    }
    assert len(of_graph) == len(cut.graphs)
    for graph in cut.graphs:  # and the graphs hold at other lengths
        operation, block_type = of_graph[graph.operation.graph]
        assert graph.operation == operation
        for direction, names in (("forward", operation.outputs), ("vjp", operation.vjp_outputs)):
            function = graph.functions[direction]
            found = function.call(*function.probes(21))
            assert [a.shape for a in found] == [shape_at(block_type.values[n], 21) for n in names]
