"""An adversary who writes manifests: refused, or what it describes runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from support.bundles import (
    Rng,
    Tiny,
    as_it_lies,
    copied,
    links,
    manifest_of,
    rewrite,
    runnable,
    say,
    with_noise,
)
from support.models import model_of
from support.mutations import mutate

from ondevice.cli.describe import describe_bundle, describe_matrices, facts_of
from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import manifest_bytes
from runtime.bundle.store import Bundle, open_bundle
from runtime.core.errors import BundleError
from runtime.methods.adapters import Adapters

GATE, UP = "mlp.gate_proj.out", "mlp.up_proj.out"  # the inputs of operation 8
LAYER, FIRST = "block_types/layer0", "matrices/model.layers.0.mlp.up_proj"
LIES: dict[str, list[Any]] = {  # what is said in a place of the manifest
    "device": ["tpu"],
    "hidden_size": [64, 128.0, 10**4000],
    "vocab_size": [321, -320, True],
    "buckets": [[], [0, 16], [16, 16], [32, 16], [16, 32], [1 << 62], {"0": 16}],
    "lora": [{}],
    "lora/rank": [0, True, 1 << 40],
    "lora/alpha": [float("nan"), float("inf"), 10**400, 0],
    "lora/targets": ["q_proj", [1]],
    "weights_nbytes": [0, 1 << 80],
    f"{FIRST}/bits": [5, 8],
    f"{FIRST}/group_size": [0, 32],
    f"{FIRST}/layout": ["symmetric", ["symmetric"], "float"],
    f"{FIRST}/scales": [None],
    f"{FIRST}/rows": [0, 10**4000],
    f"{FIRST}/packed/nbytes": [10**4000, 0],
    f"{FIRST}/packed/offset": [-64, 0, 1 << 62, 1],
    f"{FIRST}/packed/dtype": ["object", "float32"],
    f"{FIRST}/packed/shape": [[192, "16"], [1 << 62] * 4000],
    f"{FIRST}/scales/dtype": ["uint32"],
    f"{FIRST}/biases": [{"offset": 0, "nbytes": 0, "dtype": "float32", "shape": [0]}],
    "vectors/model.norm.weight/shape": [[], [2, 64]],
    "vectors/model.norm.weight/dtype": ["uint32"],
    f"{LAYER}/name": ["layer1"],
    f"{LAYER}/input": [""],
    f"{LAYER}/output": ["x", "nothing"],
    f"{LAYER}/values/x": [[1, "T", 64], [1, "T", "T"], [1, 16, 128], ["S", "T", 128], [1, "T", 0]],
    f"{LAYER}/values/out": ["T"],
    f"{LAYER}/values/~x": [[1, "T", 128]],
    f"{LAYER}/parameters/extra.weight": [[128]],
    f"{LAYER}/values/attention0.out.lse": [[1, "T", 128]],
    f"{LAYER}/operations": [[], [{"op": "elementwise"}] * 201],
    f"{LAYER}/operations/1/op": ["tiled"],
    f"{LAYER}/operations/1/operations": [[{"op": "elementwise"}]],
    f"{LAYER}/operations/0/op": ["exec", "head"],
    f"{LAYER}/operations/0/graph": ["layer9.0", "layer0.2"],
    f"{LAYER}/operations/0/inputs": [["x"], ["x", "@nothing"]],
    f"{LAYER}/operations/0/vjp_inputs": [["x", "~~x"]],
    f"{LAYER}/operations/0/vjp_outputs": [["x", "x"]],
    f"{LAYER}/operations/0/gated": ["silu"],
    f"{LAYER}/operations/1/gated": ["silu"],
    f"{LAYER}/operations/8/gated": ["tanh", "xielu"],
    f"{LAYER}/operations/8/inputs": [[UP, GATE]],
    f"{LAYER}/operations/8/vjp_inputs": [[UP, GATE, "~mlp.down_proj.in"]],
    f"{LAYER}/operations/8/vjp_outputs": [[UP, GATE]],
    f"{LAYER}/operations/8/vjp_same": [["~mlp.down_proj.in", ""]],
    f"{LAYER}/operations/0/vjp_same": [[], ["x"], ["~x"]],
    f"{LAYER}/operations/2/vjp_same": [["", "self_attn.q_proj.out", ""]],
    f"{LAYER}/operations/1/inputs": [["@input_layernorm.weight"], []],
    f"{LAYER}/operations/1/linears": [[]],
    f"{LAYER}/operations/1/linears/1/output": ["self_attn.q_proj.out"],
    f"{LAYER}/operations/1/linears/1/name": ["self_attn.q_proj", "../../embed_tokens"],
    f"{LAYER}/operations/1/linears/1/bias": [1],
    f"{LAYER}/operations/1/window": [5],
    f"{LAYER}/operations/0/position": [True],
    f"{LAYER}/operations/2/position": [1, False],
    f"{LAYER}/operations/2/tokenwise": [False],
    f"{LAYER}/operations/3/position": [True],
    f"{LAYER}/operations/3/scale": [float("nan"), 0, 1e39, 10**400],
    f"{LAYER}/operations/3/cap": [0, 1e-39, 1e39],
    f"{LAYER}/operations/3/window": [0],
    f"{LAYER}/operations/3/inputs": [
        ["attention0.q", "attention0.k"], ["attention0.q", "attention0.k", "attention0.k"],
        ["attention0.k", "attention0.q", "attention0.v"],
    ],
    "block_types/embed/operations/0/matrix": ["lm_head", "model.layers.0.mlp.up_proj"],
    "block_types/embed/operations/0/outputs": [[]],
    "block_types/head/operations/1/inputs": [["x"], []],
    "blocks": [[]],
    "blocks/1/type": ["embed", "layer7"],
    "blocks/1/name": ["model.layers.1", "model.layers.5"],
    "blocks/3/type": ["layer0"],
    "graphs/layer0.0.forward.16/file": [
        "../secret", "/etc/passwd", "graphs/../../secret", "weights.bin",
        "tokenizer/tokenizer.json", "graphs/" + "x" * 300, "graphs/\0", "graphs/nothing",
    ],
    "graphs/layer0.0.forward.16/nbytes": [1],
    "graphs/layer0.0.forward.16/inputs": [[[1, 16, 128]]],
    "graphs/layer0.0.forward.16/outputs": [[[1, 16, -128]]],
    "graphs/layer0.0.forward.1/inputs": [[[1, 1, 128], [64]]],
    "graphs/layer0.1.decode.16/inputs": [
        [[1, 16, 128], [1, 16, 64], [1, 16, 64]], [[1, 16, 128], [1, 16, 64], [1, 16, 64], [1]],
    ],
    "files/..": [{"nbytes": 0, "sha256": ""}],
    "files/manifest.json": [{"nbytes": 0, "sha256": ""}],
    "files/tokenizer~1tokenizer.json": [{"nbytes": 0, "sha256": ""}],
    "files": [{"tokenizer/../weights.bin": {"nbytes": 0, "sha256": ""}}],
    "unknown": [1],
    f"{LAYER}/unknown": [1],
    f"{FIRST}/packed/unknown": [None],
}  # fmt: skip


def rewritten(bundle: Bundle, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a bundle whose manifest is changed."""
    document = manifest_of(bundle.path)
    change(document)
    rewrite(links(bundle, folder), document)
    return folder


@pytest.mark.parametrize(
    ("where", "value"),
    [(where, value) for where, values in LIES.items() for value in values],
    ids=lambda part: repr(part)[:40],
)
def test_lies_are_refused(origin: Bundle, tmp_path: Path, where: str, value: Any) -> None:
    path = say(links(origin, tmp_path / "bundle"), where, value)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert len(str(caught.value)) < 2000


SPARE = {"offset": 0, "nbytes": 0, "dtype": "float32", "shape": [0]}
TOO_MANY = {
    "buckets": (lambda m: {"buckets": list(range(16, 16 + 65))}, "65 buckets, at most 64"),
    "blocks": (lambda m: {"blocks": [*m["blocks"], *[m["blocks"][1]] * 1026]}, "at most 1026"),
    "types": (
        lambda m: {"block_types": {f"t{at}": m["block_types"]["head"] for at in range(129)}},
        "129 block types, at most 128",
    ),
    "bytes": (lambda m: {"provenance": {"x": "x" * (4 << 20)}}, "which has 4,194,304 at most"),
}


@pytest.mark.parametrize("what", TOO_MANY)
def test_more_than_any_model_has_is_refused(origin: Bundle, tmp_path: Path, what: str) -> None:
    change, told = TOO_MANY[what]
    path = rewritten(origin, tmp_path / "bundle", lambda found: found.update(change(found)))
    with pytest.raises(BundleError, match=told):
        open_bundle(path)


def test_as_many_vectors_as_fit_a_manifest_are_read(origin: Bundle, tmp_path: Path) -> None:
    more = {f"v{at}": SPARE for at in range(50_000)}
    path = rewritten(origin, tmp_path / "bundle", lambda found: found["vectors"].update(more))
    assert len(open_bundle(path).manifest.vectors) > 50_000


FLOAT_LIES = [
    ("layout", "symmetric", "16 bits"),
    ("layout", "affine", "16 bits"),
    ("bits", 32, "32 bits of dtype bfloat16"),
    ("bits", 4, "4 bits of dtype bfloat16"),
    ("group_size", 64, "group size 64 and layout float"),
    ("group_size", -1, "group size -1 and layout float"),
    ("packed/dtype", "uint32", "bytes, its shape needs"),
    ("packed/dtype", "float32", "bytes, its shape needs"),
    ("packed/dtype", "float64", "unknown dtype"),
    ("packed/shape", [128, 192], r"shape \(128, 192\), expected \(192, 128\)"),
    ("scales", SPARE, "scales or biases and layout float"),
    ("biases", SPARE, "scales or biases and layout float"),
]


@pytest.mark.parametrize(("where", "value", "told"), FLOAT_LIES, ids=lambda part: repr(part)[:40])
def test_lies_about_floats_are_refused(
    tiny: Tiny, tmp_path: Path, where: str, value: Any, told: str
) -> None:
    bundle = tiny("qwen2", layouts="bfloat16")
    path = say(links(bundle, tmp_path / "bundle"), f"{FIRST}/{where}", value)
    with pytest.raises(BundleError, match=told):
        open_bundle(path)


def test_words_are_not_floats(origin: Bundle, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        matrix = document["matrices"]["model.embed_tokens"]
        matrix |= {"layout": "float", "group_size": 0, "bits": 32}
        del matrix["scales"]

    path = rewritten(origin, tmp_path / "bundle", change)
    with pytest.raises(BundleError, match="layout float of dtype uint32"):
        open_bundle(path)


WHOLE = {"relative_rms": 0.1, "rms": 0.01, "max": 0.5}


@pytest.mark.parametrize(
    "error",
    [
        {"max": 0.5},
        {"relative_rms": 0.1},
        {**WHOLE, "median": 0.0},
        {**WHOLE, "rms": -0.01},
        {**WHOLE, "max": float("nan")},
        {**WHOLE, "max": float("inf")},
    ],
    ids=repr,
)
def test_error_statistics_are_whole_or_absent(
    origin: Bundle, tmp_path: Path, error: dict[str, float]
) -> None:
    path = links(origin, tmp_path / "bundle")
    document = manifest_of(origin.path)
    for good in ({}, WHOLE):
        document["matrices"]["model.embed_tokens"]["error"] = good
        rewrite(path, document)
        inspect(open_bundle(path))
    document["matrices"]["model.embed_tokens"]["error"] = error
    rewrite(path, document)
    with pytest.raises(BundleError):
        open_bundle(path)


@pytest.mark.parametrize("odd", ["\ud800", float("nan"), [{"a": float("inf")}]], ids=repr)
def test_what_could_not_be_shown_is_refused(origin: Bundle, tmp_path: Path, odd: Any) -> None:
    path = say(links(origin, tmp_path / "bundle"), "provenance/name", odd)
    with pytest.raises(BundleError, match="is damaged: JSON is malformed"):
        open_bundle(path)
    facts = {**origin.manifest.provenance, "name": odd}  # nor is it written
    with pytest.raises(BundleError, match="not finite, or a text that is not valid Unicode"):
        check_manifest(msgspec.structs.replace(origin.manifest, provenance=facts))


def test_operations_and_extents_that_clash(origin: Bundle, tmp_path: Path) -> None:
    path = links(origin, tmp_path / "bundle")
    operations = manifest_of(origin.path)["block_types"]["layer0"]["operations"]
    orders = [
        operations + operations[-1:],
        operations[:-1],
        operations[1:],
        operations[::-1],
        [operations[3], *operations],
    ]
    orders.append(
        [*operations[:4], {"op": "embedding", "outputs": ["e"], "matrix": "m"}, *operations[4:]]
    )
    for order in orders:
        document = manifest_of(origin.path)
        document["block_types"]["layer0"]["operations"] = order
        rewrite(path, document)
        with pytest.raises(BundleError):
            open_bundle(path)
    document = manifest_of(origin.path)
    one, two = (document["matrices"][f"model.layers.{i}.mlp.up_proj"] for i in range(2))
    two["scales"]["offset"] = one["scales"]["offset"]
    rewrite(path, document)
    with pytest.raises(BundleError, match="overlaps"):
        open_bundle(path)


def runs(path: Path, rng: Rng) -> None:
    """Run a bundle, forward and backward: an accepted manifest may only fail as a BundleError."""
    bundle = as_it_lies(path)
    manifest = bundle.manifest
    if not manifest.graphs:
        return  # they are traced where the bundle is used
    model = model_of(bundle, manifest.buckets[0])
    adapters = Adapters.initial(manifest, 0)
    x = model.embed(rng.integers(0, manifest.vocab_size, 5))
    for block in model.blocks[1:-1]:
        y = model.forward(block, x, adapters.loras(block))
        dx, gradients = model.backward(block, x, y, adapters.loras(block))
        assert (dx is None) == (block is model.blocks[1])
        assert set(gradients) == set(manifest.adapted(block))
        mx.eval(gradients if dx is None else (dx, gradients))
        x = y
    h, targets = model.hidden(x, np.arange(1, 4)), rng.integers(0, manifest.vocab_size, 3)
    (result,) = model.losses([h], [targets], gradient=True)
    assert result.dh is not None
    mx.eval(result.loss, model.head_backward(x, result.dh, np.arange(1, 4)))


def inspect(bundle: Bundle) -> None:
    """What is accepted can be shown, as text and as strict JSON."""
    (describe_bundle(bundle) + describe_matrices(bundle)).encode()
    json.dumps(facts_of(bundle), ensure_ascii=False, allow_nan=False).encode()


def harmless(path: Path, origin: Bundle) -> bool:
    """Whether a manifest differs in nothing but names, notes and sums, which a run never reads."""
    unread = {"config": {}, "provenance": {}, "family": "", "mlx_version": "", "weights_sha256": ""}

    def read(bundle: Bundle) -> Any:
        manifest = msgspec.structs.replace(bundle.manifest, files={}, device="", **unread)
        return manifest_bytes(manifest)

    return read(open_bundle(path)) == read(origin)


@pytest.mark.parametrize("layouts", ["", "mixed"])
def test_random_changes_are_refused_or_run(
    origin: Bundle, tiny: Tiny, tmp_path: Path, rng: Rng, layouts: str
) -> None:
    if layouts:
        origin = tiny("qwen2", layouts, seq_lens=(16,))
    path = links(origin, tmp_path / "bundle")
    original = manifest_of(origin.path)
    text = json.dumps(original)
    refused = 0
    for _ in range(100):
        document = json.loads(text)
        for name in ("config", "provenance"):  # free text to a reader
            if rng.random() < 0.9:
                del document[name]
        done = mutate(document, rng)
        for name in ("config", "provenance"):
            document.setdefault(name, original[name])
        rewrite(path, document)
        try:
            inspect(open_bundle(path))
            if not harmless(path, origin):
                runs(path, rng)
        except BundleError:
            refused += 1
        except Exception as problem:
            raise AssertionError(done) from problem
    assert refused > 50


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("lora/rank", 3),
        ("lora/alpha", 0.5),
        ("lora/targets", ["q_proj", "down_proj"]),
        ("lora/targets", []),
        ("lora/targets", ["no such layer"]),
        (f"{LAYER}/operations/3/window", 5),
        (f"{LAYER}/operations/3/scale", 1e30),
        ("graphs/layer0.0.vjp.16/workspace_bytes", 1 << 62),
        ("matrices/model.layers.1.mlp.up_proj", "matrices/model.layers.0.mlp.up_proj"),
        ("blocks/1/name", "model.layers.1"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_other_truths_run(origin: Bundle, tmp_path: Path, rng: Rng, where: str, value: Any) -> None:
    """What is well formed runs, or is refused: sharing bytes or layers is no program of ours."""
    shared = where.startswith(("matrices", "blocks"))
    if where.startswith("matrices"):
        value = manifest_of(origin.path)["matrices"][value.removeprefix("matrices/")]
    path = say(links(origin, tmp_path / "bundle"), where, value)
    if shared:
        with pytest.raises(BundleError):
            open_bundle(path)
    else:
        runs(path, rng)


def test_graphs_that_are_not_what_the_manifest_says_are_refused(
    origin: Bundle, tmp_path: Path, rng: Rng
) -> None:
    """Even where sizes and checksums have been made to fit; those that never run here are not."""
    document = manifest_of(origin.path)
    keys = list(document["graphs"])
    operations = [one for each in origin.manifest.block_types.values() for one in each.operations]
    by_kernel = {one.graph for one in operations if not one.on_device("cpu").graph}
    for index, (mine, theirs) in enumerate(zip(keys, rng.permutation(keys), strict=True)):
        path = links(origin, tmp_path / str(index))
        changed = json.loads(json.dumps(document))
        for field in ("file", "nbytes", "sha256"):
            changed["graphs"][mine][field] = document["graphs"][theirs][field]
        rewrite(path, changed)
        open_bundle(path).verify()
        fields = ("inputs", "outputs")
        fits = all(document["graphs"][mine][f] == document["graphs"][theirs][f] for f in fields)
        decodes = ".decode." in mine or mine.endswith(".1")
        if fits or decodes or mine.rsplit(".", 2)[0] in by_kernel:
            runs(path, rng)  # another function that fits: only a checksum from elsewhere can tell
        else:
            with pytest.raises(BundleError):
                runs(path, rng)


def test_a_graph_of_noise_is_refused(origin: Bundle, tmp_path: Path, rng: Rng) -> None:
    path = with_noise(origin, tmp_path / "bundle", rng)
    with pytest.raises(BundleError, match="cannot be loaded"):
        runs(path, rng)


def test_a_graph_that_changes_after_the_start_does_not_run(
    origin: Bundle, tmp_path: Path, rng: Rng
) -> None:
    path = copied(origin, tmp_path / "bundle")
    model = model_of(runnable(path), origin.manifest.buckets[0])
    for graph in origin.manifest.graphs.values():
        (path / graph.file).write_bytes(rng.bytes(graph.nbytes))
    x = model.embed(rng.integers(0, origin.manifest.vocab_size, 5))
    with pytest.raises(BundleError, match="is altered"):
        model.forward(model.blocks[1], x, {})
