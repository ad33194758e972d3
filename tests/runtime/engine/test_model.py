"""Models of every family, forward and reversed, against dense autograd and finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope
from oracles import whole_model as reference
from support.bundles import Rng, Tiny
from support.layouts import MIXED, STORED_IN_TURN, Layout
from support.lengths import pairs
from support.lora import with_lora
from support.models import (
    CLOSE,
    FAMILIES,
    MIXERS,
    adapters_of,
    agree,
    check_gradients,
    each_family,
    mebp,
    model_of,
    packed_of,
    rows_of,
    scored_logits,
    scored_of,
    with_input_gradients,
)

from runtime.bundle.store import Bundle
from runtime.engine.sample import PackedRows, Row, Sample
from runtime.methods.mebp import StepDropout
from runtime.objectives.accuracy import Accuracy
from runtime.objectives.next_token import NextToken
from runtime.operations.attention import Attention
from runtime.run.evaluate import evaluate

ARITHMETICS = ("unpacked", "packed")
COMPUTED = [("", "unpacked"), ("mixed", "packed"), ("", "packed"), ("mixed", "unpacked")]


@each_family
def test_a_mixed_model_has_every_layout(tiny: Tiny, family: str) -> None:
    found = {
        Layout(m.packed.dtype) if m.is_float else Layout(m.layout, m.bits, m.group_size)
        for m in tiny(family, "mixed").manifest.matrices.values()
    }
    assert found == set(MIXED)
    assert len(found) == 2 * 2 * 3 + 3


# --- against the dense model ------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@each_family
def test_logits_are_mlx_lms(tiny: Tiny, rng: Rng, family: str, arithmetic: str) -> None:
    bundle = tiny(family)
    adapters = adapters_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    for bucket in bundle.manifest.buckets:
        tokens = rng.integers(0, bundle.manifest.vocab_size, int(rng.integers(1, bucket + 1)))
        model, everywhere = model_of(bundle, bucket, arithmetic), np.arange(len(tokens))
        found = mx.array(scored_logits(model, adapters, tokens, everywhere))
        expected = dense(mx.array(tokens)[None])[0]
        assert found.shape == expected.shape
        assert float(mx.abs(found - expected).max()) <= 1e-4
        assert reference.relative_error(found, expected) <= CLOSE


PLAINER = ("qwen2", "llama")  # no norms of queries and keys, and no windows
OTHERS: list[dict[str, Any]] = [
    {"lora_targets": "q_proj,v_proj"},
    {"lora_targets": "down_proj", "lora_rank": 3, "lora_alpha": 1.5},
    {"bits": 8, "embedding_bits": 8, "group_size": 32},
    *({"layouts": name} for name in ("float32", "float16", "bfloat16")),
]
EVERY = [({"layouts": layouts}, arithmetic) for layouts, arithmetic in COMPUTED]
ENDS: list[tuple[str, dict[str, Any], str]] = [  # tied, tied with a factor, and not
    ("qwen2", {"layouts": "mixed", "targets": ("embed_tokens",)}, "packed"),
    ("gemma3", {"targets": ("embed_tokens", "q_proj")}, "unpacked"),
    ("llama", {"layouts": "mixed", "targets": ("embed_tokens", "lm_head", "down_proj")}, "packed"),
    ("llama", {"targets": ("lm_head",)}, "unpacked"),
    ("llama", {"targets": ("embed_tokens", "v_proj")}, "unpacked"),
]


@pytest.mark.parametrize(
    ("family", "settings", "arithmetic"),
    [
        *pairs(FAMILIES, EVERY, 2),
        *pairs(FAMILIES, [(settings, "unpacked") for settings in OTHERS]),
        *ENDS,
    ],
    ids=str,
)
def test_gradients_are_autograds(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, settings: dict[str, Any], arithmetic: str
) -> None:
    """Of rows, and of packed ones: alone, and in one sequence with a mask over all its scores."""
    exported = {key: value for key, value in settings.items() if key != "targets"}
    bundle, targets = tiny(family, **exported), settings.get("targets")
    if targets is not None:
        bundle = with_lora(bundle, targets=targets, layers=2)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    packed = packed_of(bundle, rng, int(rng.integers(40, 65)), 30)
    dense = reference.dense_model(bundle, adapters)
    samples: Sequence[tuple[int, Sequence[Sample]]] = [(32, rows), (64, [packed])]
    for bucket, given in samples:
        model = model_of(bundle, bucket, arithmetic)
        found = check_gradients(dense, model, adapters, given, tmp_path)
    agree(found, reference.packed_gradients(dense, packed)[1])
    named = targets or settings.get("lora_targets", "").split(",")
    ours = {name.split(".")[-2] for name in found}
    assert ours == {*named} if any(named) else len(found) == 2 * 7 * len(bundle.manifest.layers)
    tokens = rows[0].inputs
    logits = mx.array(scored_logits(model, adapters, tokens, np.arange(len(tokens))))
    assert reference.relative_error(logits, dense(mx.array(tokens)[None])[0]) <= CLOSE


def test_a_backward_pass_ends_at_the_first_layer_with_adapters(
    tiny: Tiny, rng: Rng, tmp_path: Path
) -> None:
    exported = tiny("gemma3")
    names = [block.label for block in exported.manifest.layers]
    for layers in range(1, len(names) + 1):
        bundle = with_lora(exported, layers=layers)
        model = model_of(bundle, 32)
        model.profile.on = True
        mebp(model, adapters_of(bundle, rng), rows_of(bundle, rng), tmp_path)
        visited = [name for name, way in model.profile.blocks if way == "backward"]
        assert visited == names[::-1][:layers]


def test_dropout_is_for_training_only(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = with_lora(tiny("qwen2"), dropout=0.4)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model = model_of(bundle, 32)
    plain, exact = mebp(model, adapters, rows, tmp_path)
    _, masked = mebp(model, adapters, rows, tmp_path, 0, StepDropout(1, adapters.dropout, 0))
    (losses,) = evaluate(model, adapters, rows, [NextToken()])
    assert sum(losses) == pytest.approx(plain.loss_sum, rel=1e-6)
    assert not any(mx.allclose(masked[name], exact[name], rtol=1e-3) for name in exact)


@pytest.mark.parametrize(
    ("length", "bound"), [(512, CLOSE), pytest.param(1024, 5e-5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma3", *(pytest.param(f, marks=pytest.mark.slow) for f in (*PLAINER, *MIXERS))],
)
def test_positions_need_not_start_again_in_long_sequences(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, length: int, bound: float
) -> None:
    """Scores depend on distances alone, so that a row's place in a sequence does not matter."""
    bundle = tiny(family, seq_lens=(512, 1024))
    adapters, packed = adapters_of(bundle, rng), packed_of(bundle, rng, length, 200)
    model = model_of(bundle, length, attention_block=64)
    dense = reference.dense_model(bundle, adapters)
    check_gradients(dense, model, adapters, [packed], tmp_path, bound=bound)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + place / 8 for place in range(16)],
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scores_depend_on_distances_alone(rng: Rng, name: str) -> None:
    """Whatever the configuration scales positions by: it is what packing rests on."""
    rope = initialize_rope(
        32, 1e4, False, {"rope_type": name, **SCALINGS[name]}, max_position_embeddings=1024
    )
    q, k = (mx.array(rng.standard_normal((1, 1, 40, 32)).astype(np.float32)) for _ in range(2))

    def scores(start: int) -> mx.array:
        return rope(q, offset=start) @ rope(k, offset=start).swapaxes(-1, -2)

    near, far = scores(0), scores(int(rng.integers(1, 470)))
    assert reference.relative_error(far, near) <= CLOSE
    assert reference.relative_error(near, q @ k.swapaxes(-1, -2)) > 0.1


def test_the_sequence_of_packed_rows() -> None:
    """The last token of a row is only predicted: it never predicts the next row's first."""
    first = Row(np.array([5, 6, 7], np.int32), np.array([1]))
    second = Row(np.array([8, 9], np.int32), np.array([0]))
    packed = PackedRows((first, second))
    assert packed.inputs.tolist() == [5, 6, 8]
    assert packed.offsets.tolist() == [0, 2, 3]
    assert packed.scored.tolist() == [1, 2]
    assert packed.targets.tolist() == [7, 9]
    assert first.rows == (first,) and first.offsets is None


def test_evaluation_counts_right_predictions(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("llama")
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model = model_of(bundle, 32)
    dense = reference.dense_model(bundle, adapters)
    first = rows[0].scored[:1]
    rows[0].tokens[first + 1] = scored_logits(model, adapters, rows[0].inputs, first)[0].argmax()
    objectives = [NextToken(), Accuracy()]
    losses, shares = evaluate(model, adapters, rows, objectives)
    for row, loss_sum, share in zip(rows, losses, shares, strict=True):
        logits = dense(mx.array(row.tokens)[None, :-1])[0, mx.array(row.scored)]
        right = logits.argmax(axis=-1) == mx.array(row.targets)
        assert -share == int(right.sum())
        loss = float(reference.batch_loss(dense, [(row.tokens, row.scored)]))
        assert loss_sum / len(row.targets) == pytest.approx(loss, rel=1e-5)
    assert -evaluate(model, adapters, rows[:1], objectives)[1][0] >= 1


def test_positions_without_a_target_get_no_gradient(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("qwen3")
    model = model_of(bundle, 32)
    x = mx.array(rng.standard_normal((1, 32, bundle.manifest.hidden_size)).astype(np.float32))
    scored = scored_of(rng, 31)
    targets = rng.integers(0, bundle.manifest.vocab_size, len(scored))
    h = model.hidden(x, scored)
    (result,) = model.losses([h], [targets], gradient=True)
    assert result.loss.shape == (len(scored),) and result.dh is not None
    dx = model.head_backward(x, result.dh, scored)
    sizes = np.array(mx.abs(dx[0]).sum(axis=-1))
    assert np.flatnonzero(sizes).tolist() == scored.tolist()
    (nothing,) = model.losses([h], [targets], gradient=False)
    assert nothing.dh is None
    np.testing.assert_allclose(np.array(nothing.loss), np.array(result.loss), rtol=1e-5)


# --- against finite differences, in float64 and without MLX -----------------------------------


class NumpyLlama:
    """Llama as its paper and its configuration describe it, in float64."""

    def __init__(self, bundle: Bundle, weights: Any) -> None:
        self.config, self.manifest = bundle.manifest.config, bundle.manifest
        self.w = {
            name: np.array(reference.dequantized(weights, matrix), np.float64)
            for name, matrix in self.manifest.matrices.items()
        }
        self.v = {
            name: np.array(weights.vector(name), np.float64) for name in self.manifest.vectors
        }

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.v[f"{name}.weight"]

    def linear(self, x: np.ndarray, name: str, lora: dict[str, np.ndarray]) -> np.ndarray:
        scale = self.manifest.lora.alpha / self.manifest.lora.rank
        return x @ self.w[name].T + scale * (x @ lora[f"{name}.lora_a"]) @ lora[f"{name}.lora_b"]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        length, width = x.shape[-2:]
        frequencies = self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)
        angles = np.arange(length)[:, None] * frequencies
        left, right = x[..., : width // 2], x[..., width // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)

    def attention(self, x: np.ndarray, name: str, lora: dict[str, np.ndarray]) -> np.ndarray:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width = self.config["hidden_size"] // heads

        def split(part: str, count: int) -> np.ndarray:
            y = self.linear(x, f"{name}.{part}_proj", lora)
            return y.reshape(len(x), count, width).transpose(1, 0, 2)

        q, k, v = (
            self.rotate(split("q", heads)),
            self.rotate(split("k", groups)),
            split("v", groups),
        )
        k, v = (np.repeat(part, heads // groups, axis=0) for part in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(width)
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = (p / p.sum(axis=-1, keepdims=True)) @ v
        return self.linear(out.transpose(1, 0, 2).reshape(len(x), -1), f"{name}.o_proj", lora)

    def mlp(self, x: np.ndarray, name: str, lora: dict[str, np.ndarray]) -> np.ndarray:
        gate = self.linear(x, f"{name}.gate_proj", lora)
        up = self.linear(x, f"{name}.up_proj", lora)
        return self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.down_proj", lora)

    def loss(self, rows: list[Row], lora: dict[str, np.ndarray]) -> float:
        total, count = 0.0, 0
        for row in rows:
            x = self.w["model.embed_tokens"][row.inputs]
            for block in self.manifest.layers:
                x = x + self.attention(
                    self.norm(x, f"{block.name}.input_layernorm"), f"{block.name}.self_attn", lora
                )
                x = x + self.mlp(
                    self.norm(x, f"{block.name}.post_attention_layernorm"),
                    f"{block.name}.mlp",
                    lora,
                )
            logits = self.norm(x, "model.norm")[row.scored] @ self.w["lm_head"].T
            top = logits.max(axis=-1, keepdims=True)
            sums = np.log(np.exp(logits - top).sum(axis=-1)) + top[:, 0]
            total += float((sums - logits[np.arange(len(logits)), row.targets]).sum())
            count += len(row.targets)
        return total / count


def test_gradients_are_differences_of_a_float64_loss(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("llama")
    adapters = adapters_of(bundle, rng)
    rows = rows_of(bundle, rng, (12, 9))
    model = model_of(bundle, 16)
    result, gradients = mebp(model, adapters, rows, tmp_path)
    dense = NumpyLlama(bundle, model.weights)
    lora = {name: np.array(value, np.float64) for name, value in adapters.tensors.items()}
    assert result.loss_sum / result.scored_tokens == pytest.approx(dense.loss(rows, lora), rel=1e-6)
    step = 1e-4
    for name, gradient in gradients.items():
        # half along the gradient, so that the slope is not lost among cancellations
        slope = np.array(gradient, np.float64)
        noise = rng.standard_normal(slope.shape)
        direction = slope / np.linalg.norm(slope) + noise / np.linalg.norm(noise)
        ahead = dense.loss(rows, {**lora, name: lora[name] + step * direction})
        behind = dense.loss(rows, {**lora, name: lora[name] - step * direction})
        expected = (ahead - behind) / (2 * step)
        assert (slope * direction).sum() == pytest.approx(expected, rel=1e-4), name


# --- what must not matter ---------------------------------------------------------------------


@pytest.mark.parametrize(("family", "layouts"), STORED_IN_TURN)
def test_keeping_is_recomputing_bit_for_bit(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, layouts: str
) -> None:
    """What the budget buys (kept values, materialized weights) changes no bit of the result."""
    bundle = tiny(family, layouts)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    loss, expected = mebp(model_of(bundle, 32), adapters, rows, tmp_path)
    layers = len(bundle.manifest.layers)
    for kept in (1, layers):
        manifest = bundle.manifest
        chosen = [matrix for matrix in manifest.matrices.values() if rng.random() < 0.5]
        model = model_of(bundle, 32)
        model.matrices.materialize(chosen)
        for _ in range(2):
            again, found = mebp(model, adapters, rows, tmp_path, kept)
            assert again.loss_sum == loss.loss_sum
            assert all(mx.array_equal(found[name], expected[name]) for name in expected)
        assert {offset for offset, *_ in model.materialized} == {m.packed.offset for m in chosen}


@each_family
def test_every_way_to_keep_is_recomputing(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str
) -> None:
    """Bit for bit, but for whole MLPs beside MLPs in slices, which round otherwise."""
    bundle = tiny(family)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    model, layers = model_of(bundle, 32, slices=True), len(bundle.manifest.layers)
    assert model.lowered.stored_values == (1 if family == "gemma3" else 0)

    def found(kept: Sequence[int], stores: bool = True) -> tuple[float, dict[str, mx.array]]:
        loss, gradients = mebp(model, adapters, rows, tmp_path, kept, stores=stores)
        return loss.loss_sum, gradients

    plain, whole = found([], stores=False), found([layers, layers])
    for kept, expected in (
        ([], plain),
        ([1], plain),
        ([layers], plain),
        ([layers, layers, 1], whole),
        ([layers] * 3, whole),
    ):
        loss, gradients = found(kept)
        assert loss == expected[0]
        assert all(mx.array_equal(gradients[name], value) for name, value in expected[1].items())
    agree(whole[1], plain[1])
    agree(found([layers, 1])[1], plain[1])


def test_backward_of_a_whole_layer_is_its_vjp(tiny: Tiny, rng: Rng) -> None:
    """dx too, which no adapter of the first layer sees."""
    bundle = tiny("gemma3")
    adapters = adapters_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    model = model_of(bundle, 32)
    shape, windows = (1, 32, bundle.manifest.hidden_size), set()
    for index, block in enumerate(bundle.manifest.layers):
        x, dy = (mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
        operations = bundle.manifest.block_types[block.type].operations
        window = next(one.window for one in operations if isinstance(one, Attention))
        windows.add(window)
        distance = mx.arange(32)[:, None] - mx.arange(32)[None]
        mask = (distance >= 0) & (distance < (window or 32))
        layer = dense.model.layers[index]
        (y,), (expected,) = mx.vjp(
            lambda x, layer=layer, mask=mask: layer(x, mask, None), [x], [dy]
        )
        loras = adapters.loras(block)
        assert reference.relative_error(model.forward(block, x, loras), y) <= CLOSE
        dx, _ = with_input_gradients(model).backward(block, x, dy, loras)
        assert dx is not None
        assert reference.relative_error(dx, expected) <= CLOSE
    assert windows == {16, None}  # a window that is shorter than the sequence, and none


@each_family
def test_the_results_of_a_graph_are_evaluated_one_by_one(
    tiny: Tiny, rng: Rng, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Together, MLX would allocate for one result while what made another is not freed yet."""
    bundle = tiny(family)
    model = model_of(bundle, 32)
    evaluated: dict[str, list[int]] = {}
    running = ""
    plain = mx.eval

    def noted(*given: Any) -> None:
        evaluated.setdefault(running, []).append(len(tree_flatten(given)))
        plain(*given)

    call = model.graphs.call

    def named(key: str, arguments: Sequence[mx.array]) -> Sequence[mx.array]:
        nonlocal running
        running = key
        return call(key, arguments)

    x, dy = (mx.array(rng.standard_normal((1, 32, bundle.manifest.hidden_size))) for _ in range(2))
    monkeypatch.setattr(mx, "eval", noted)
    monkeypatch.setattr(model.graphs, "call", named)
    model.backward(model.blocks[1], x, dy, adapters_of(bundle, rng).loras(model.blocks[1]))
    evaluated.pop("", None)  # before the first graph
    several = [key for key in evaluated if len(bundle.manifest.graphs[key].outputs) > 1]
    assert {key.rsplit(".", 2)[1] for key in several} == {"forward", "vjp"}
    assert all(evaluated[key][0] == 1 for key in several)
