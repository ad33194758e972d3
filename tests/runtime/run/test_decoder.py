"""Decoding with a cache: the dense model's logits, whatever is read together and kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace
from oracles.prefix import prefix_logits
from support.bundles import Rng, Tiny
from support.compiled import require_compiled
from support.generation import dense_logits
from support.layouts import LAYOUTS, WITH_EXPERTS
from support.lengths import pairs
from support.lora import prefix_of, with_prefix
from support.models import FAMILIES, MIXERS, adapters_of, each_family
from support.plans import COMPILED
from support.random_types import random_bundle

from runtime.adapters.lora import LoraSettings
from runtime.arrays.packed_rows import PackedRows
from runtime.arrays.stored import Extent, Matrix
from runtime.arrays.stored_codes import Stored
from runtime.bundle.store import Bundle
from runtime.core.errors import BudgetError
from runtime.engine.graphs import Graphs
from runtime.methods.adapters import Adapters
from runtime.operations.attention import CachedAttention
from runtime.operations.values import CHUNK_TOKENS, DECODED_TOKENS
from runtime.plan.lower import lower
from runtime.plan.plan import Plan, Request, Task
from runtime.plan.planner import DECODING_LANES, Planner
from runtime.plan.size_levels import LEVELS
from runtime.run.budget import decoding, plan_decoding
from runtime.run.decoder import Decoder
from runtime.run.lora import to_apply
from runtime.run.session import open_session

CLOSE = 1e-5  # of the largest logit; products of one token round otherwise than those of many
CONTEXT = 160
PLANS: dict[str, dict[str, Any]] = {
    "frugal": {"lanes": 1, "materialized_layers": 0, "materialized_head": False},
    "generous": {"materialized_layers": 2, "materialized_head": True},
    "half": {"lanes": 3, "materialized_layers": 1, "materialized_head": False},
    "in place": {"in_place": True, "materialized_layers": 0, "materialized_head": False},
}


@each_family
def test_what_decodes_sees_the_prefix(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = with_prefix(tiny(family), int(rng.choice([1, 5, 20])))
    adapters, tokens = prefix_of(bundle, rng), tokens_of(bundle, rng, 90)
    expected = prefix_logits(bundle, adapters, tokens)
    decoder = Decoder(open_session(bundle, plan_of(bundle)), adapters)
    check_parts(decoder, tokens, rng, expected)


def test_a_token_takes_no_larger_tiles_because_code_is_compiled(tiny: Tiny) -> None:
    require_compiled()
    bundle = tiny("qwen2")
    model = open_session(bundle, replace(plan_of(bundle, "frugal"), compiled=True)).at(1)
    parts = [[*model.matrices.taken(each)] for each in bundle.manifest.matrices.values()]
    assert parts == [[*model.matrices.ranges(each)] for each in bundle.manifest.matrices.values()]
    assert max(map(len, parts)) > 1


def plan_of(bundle: Bundle, kind: str = "generous") -> Plan:
    small = LEVELS[-1]
    if kind == "in place":
        require_compiled()
    choices = {"in_place": False, **PLANS[kind]}
    plan = replace(plan_decoding(bundle, 10**9, CONTEXT), **choices)
    if kind in ("generous", "in place"):
        return plan
    return replace(plan, tile_values=8_000, attention_block=small.attention_block)


def tokens_of(bundle: Bundle, rng: Rng, count: int) -> list[int]:
    return [int(one) for one in rng.integers(0, bundle.manifest.vocab_size, count)]


def agrees(found: Any, expected: Any) -> bool:
    return float(np.abs(found - expected).max()) <= CLOSE * float(np.abs(expected).max())


def read_in_parts(decoder: Decoder, tokens: list[int], rng: Rng) -> dict[int, Any]:
    """Read tokens in parts of random lengths; the logits after each part, by its end."""
    found = {}
    while (at := len(decoder.tokens)) < len(tokens):
        count = int(rng.choice([1, 1, 2, 15, 16, 17, 40]))
        part = tokens[at : at + count]
        found[at + len(part)] = decoder.read(part)
    return found


def check_parts(decoder: Decoder, tokens: list[int], rng: Rng, expected: Any) -> None:
    for end, logits in read_in_parts(decoder, tokens, rng).items():
        assert agrees(logits, expected[end - 1]), end


def without_adapters(bundle: Bundle) -> Decoder:
    adapters = Adapters.applied(to_apply(None, bundle).manifest, None)
    return Decoder(open_session(bundle, plan_of(bundle)), adapters)


@pytest.mark.parametrize(("family", "kind"), pairs([*FAMILIES, *MIXERS, "gemma4"], PLANS))
def test_logits_are_those_of_the_whole(tiny: Tiny, rng: Rng, family: str, kind: str) -> None:
    """Beyond Gemma's window of 16, the longest bucket of 64, with adapters of every matrix."""
    plain = tiny(family)
    manifest = plain.manifest
    outside = () if manifest.borrowed_names else manifest.outside_names
    targets = (*manifest.linear_names, *outside)
    bundle = plain.with_lora(LoraSettings(int(rng.choice([1, 3, 8])), 7.0, targets))
    adapters = adapters_of(bundle, rng)
    tokens = tokens_of(bundle, rng, 80)
    expected = dense_logits(bundle, adapters, tokens)
    decoder = Decoder(open_session(bundle, plan_of(bundle, kind)), adapters)
    check_parts(decoder, tokens, rng, expected)


@pytest.mark.parametrize(("family", "layouts"), [("", one) for one in LAYOUTS] + [WITH_EXPERTS])
def test_matrices_of_any_layout_are_decoded(
    tiny: Tiny, rng: Rng, family: str, layouts: str
) -> None:
    family = family or str(rng.choice(FAMILIES))
    bundle = tiny(family, layouts=layouts)
    adapters = adapters_of(bundle, rng)
    tokens = tokens_of(bundle, rng, 40)
    expected = dense_logits(bundle, adapters, tokens)
    in_place = ["in place"] if plan_decoding(bundle, 10**9, CONTEXT).in_place else []
    for kind in ("frugal", "half", *in_place):
        decoder = Decoder(open_session(bundle, plan_of(bundle, kind)), adapters)
        check_parts(decoder, tokens, rng, expected)
        if (products := decoder.session.in_place) is not None:  # each once, as the plan counts them
            kept, vectors = products.vectors, bundle.manifest.vectors
            assert kept and all(kept[name].size == math.prod(vectors[name].shape) for name in kept)


@pytest.mark.parametrize("model_type", ["phi3", pytest.param("nemotron", marks=pytest.mark.slow)])
def test_halves_of_one_matrix_and_mlps_without_a_gate_are_decoded(
    rng: Rng, tmp_path: Path, model_type: str
) -> None:
    bundle = random_bundle(tmp_path, model_type, bits=4)
    adapters, tokens = adapters_of(bundle, rng), tokens_of(bundle, rng, 40)
    expected = dense_logits(bundle, adapters, tokens)
    for kind in ("frugal", "in place"):
        decoder = Decoder(open_session(bundle, plan_of(bundle, kind)), adapters)
        check_parts(decoder, tokens, rng, expected)


@pytest.mark.parametrize("family", ["gemma3", "llama", "lfm2"])
def test_a_sequence_that_is_taken_up_again_is_read_from_where_it_parts(
    tiny: Tiny, rng: Rng, family: str
) -> None:
    bundle = tiny(family)
    decoder = without_adapters(bundle)
    tokens = tokens_of(bundle, rng, 90)
    read_in_parts(decoder, tokens, rng)
    before = len(tokens)
    for keep in (88, 60, 10, 90):
        apart = (tokens[keep % 90] + 1) % bundle.manifest.vocab_size
        other = [*tokens[:keep], apart, *tokens_of(bundle, rng, 29)]
        kept = decoder.rewind(other)
        lost = family != "llama" and before - keep > 16  # what is in the window has gone
        # with a padded last chunk, up to 15 slots more have been written
        unsure = family != "llama" and before - keep > 1
        assert kept == len(decoder.tokens)
        assert kept == 0 if lost else kept in ((0, keep) if unsure else (keep,))
        logits = decoder.read(other[kept:])
        assert agrees(logits, dense_logits(bundle, None, other)[-1])
        decoder.rewind([])
        read_in_parts(decoder, tokens, rng)
    again = decoder.rewind(tokens)
    assert again == len(tokens) - 1  # the last is read for its logits
    assert agrees(decoder.read(tokens[again:]), dense_logits(bundle, None, tokens)[-1])


def test_a_token_is_multiplied_where_weights_lie_if_they_can_be(tiny: Tiny) -> None:
    task = Task(Request(CHUNK_TOKENS, False, context=CONTEXT), decoding(CONTEXT))

    def plan(bundle: Bundle, budget_bytes: int) -> Plan:
        return Planner(bundle.manifest, COMPILED).plan(task, budget_bytes)

    generous = plan(tiny("qwen2"), 10**9)
    assert generous.in_place
    kept = 100_000  # more than its vectors, which are read again elsewhere
    assert plan(tiny("qwen2"), generous.minimum_bytes + kept).in_place
    for layouts in ("float16", "mixed"):  # of which some matrices, or all, are not multiplied so
        assert not plan(tiny("qwen2", layouts=layouts), 10**9).in_place


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["symmetric", "affine"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_in_place_are_those_of_the_values(
    rng: Rng, bits: int, layout: Literal["symmetric", "affine"], dtype: str
) -> None:
    require_compiled()
    rows, size, groups = int(rng.integers(1, 70)), int(rng.choice([32, 64, 128])), 3
    columns = size * groups
    q = rng.integers(0, 1 << bits, (rows, columns))
    words = sum(q.reshape(rows, -1, 8 // bits)[..., i] << bits * i for i in range(8 // bits))
    scales, biases = (mx.array(rng.normal(size=(rows, groups)), getattr(mx, dtype)) for _ in "12")
    x = rng.normal(size=(int(rng.choice([1, 16])), columns)).astype(np.float32)

    class Mapped:
        def stored(self, matrix: Matrix) -> Stored:
            parts = (scales,) if matrix.biases is None else (scales, biases)
            as_bits = (np.asarray(part.view(mx.uint16)) for part in parts)
            return words.astype(np.uint8).view(np.uint32), *as_bits

    of_groups = Extent(0, 0, dtype, (rows, groups))
    packed = Extent(0, 0, "uint32", (rows, columns * bits // 32))
    also = of_groups if layout == "affine" else None
    matrix = Matrix(rows, columns, bits, size, layout, packed, of_groups, also)
    (y,) = PackedRows(Mapped(), 2).multiply(x, [matrix])
    wide = np.asarray(scales.astype(mx.float32), np.float64)
    shift = -(2.0 ** (bits - 1)) * wide if also is None else np.asarray(biases.astype(mx.float32))
    values = q.reshape(rows, groups, size) * wide[..., None] + shift[..., None]
    assert agrees(y, x @ values.reshape(rows, columns).T)


def test_a_state_goes_on_from_the_last_token_alone(tiny: Tiny, rng: Rng) -> None:
    """What preceded an earlier one is not kept; then all is read again, from a state of zeros."""
    bundle = tiny("qwen3_5")
    decoder = without_adapters(bundle)
    tokens = tokens_of(bundle, rng, 60)
    read_in_parts(decoder, tokens[:40], rng)
    another = 1 - min(tokens[59], 1)
    for others, kept in ((tokens[:41], 40), ([*tokens[:59], another], 0), (tokens, 0)):
        read = decoder.rewind(others)
        assert read == len(decoder.tokens) == kept
        logits = decoder.read(tokens[read:])
        assert agrees(logits, dense_logits(bundle, None, tokens)[-1])


def test_no_more_is_read_than_the_context_holds(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("qwen2")
    decoder = without_adapters(bundle)
    tokens = tokens_of(bundle, rng, CONTEXT)
    logits = decoder.read(tokens)
    assert agrees(logits, dense_logits(bundle, None, tokens)[-1])
    with pytest.raises(ValueError, match=f"1 tokens after {CONTEXT}, in a context of {CONTEXT}"):
        decoder.read([0])


def test_the_plan_counts_the_cache_and_refuses_what_does_not_fit(tiny: Tiny) -> None:
    bundle = tiny("gemma3")
    config, layers = bundle.manifest.config, bundle.manifest.layers
    plan = plan_decoding(bundle, 10**9, 1000)
    lowered = lower(bundle.manifest, 16, plan.sizes, packed=False, context=1000)
    windows = [
        next(one for one in layer.program.operations if isinstance(one, CachedAttention)).window
        for layer in lowered.layers
    ]
    assert windows.count(None) < len(layers) == len(windows)
    slots = sum((1000 if window is None else window) + 15 for window in windows)
    width = config["num_key_value_heads"] * config["head_dim"]
    assert plan.cached_bytes == slots * width * 2 * 4
    twice = plan_decoding(bundle, 10**9, 2000)
    assert twice.predicted_peak_bytes > plan.predicted_peak_bytes
    with pytest.raises(BudgetError, match=r"at 1000000 tokens; the smallest that fits is .*B"):
        plan_decoding(bundle, 200_000_000, 1_000_000)


def test_a_plan_counts_as_many_chunks_together_as_the_prompt_has(tiny: Tiny) -> None:
    bundle = tiny("qwen2")
    plans = [plan_decoding(bundle, 10**9, 1000, prompt) for prompt in (1, 16, 17, 40, None)]
    assert [plan.lanes for plan in plans] == [1, 1, 2, 3, DECODING_LANES]
    peaks = [plan.predicted_peak_bytes for plan in plans]
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3] < peaks[4]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_graphs_are_replayed_by_numpy(tiny: Tiny, rng: Rng, family: str) -> None:
    bundle = tiny(family)
    graphs = Graphs(bundle)
    for key, graph in bundle.manifest.graphs.items():
        direction, tokens = key.rsplit(".", 2)[1:]
        if direction == "vjp" or int(tokens) not in DECODED_TOKENS:
            continue
        given = [
            rng.normal(size=shape).astype(np.float32) if shape else np.int32(rng.integers(99))
            for shape in graph.inputs
        ]
        results = graphs.call(key, [mx.array(one) for one in given])
        for again in graphs.replay(key, given), graphs.replay(key, given):
            for expected, replayed in zip(results, again, strict=True):
                assert replayed.shape == expected.shape
                assert agrees(replayed, np.asarray(expected))
