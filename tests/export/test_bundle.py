"""Exporting: what a checkpoint or a setting does to a bundle, its graphs and forms; refusals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from support.bundles import Rng, put, settings
from support.checkpoints import weights_of, write_folder
from support.files import listing
from support.runs import here, ondevice, refuses, struck, succeeds

from export import graph_files
from export.bundle import export_bundle
from export.graph_files import trace_graphs
from export.sources import source
from export.stored import QuantizedForm, QuantizedRows, codes_of, words_of
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import WEIGHTS, Bundle
from runtime.bundle.traced import RECORD, read_traced
from runtime.core.errors import BundleError, UsageError

# --- checkpoints and settings -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.up_proj.weight", np.nan),
        ("model.layers.1.mlp.up_proj.weight", -np.inf),
        ("model.norm.weight", np.inf),
    ],
)
def test_values_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, rng: Rng, name: str, value: float
) -> None:
    config, arrays = weights_of("tiny-llama")
    flat = arrays[name].reshape(-1)
    at = int(rng.integers(flat.size))
    flat[at] = value
    folder = write_folder(tmp_path / "checkpoint", config, arrays)
    with pytest.raises(BundleError, match=name) as caught:
        export_bundle(settings(folder, tmp_path / "out"))
    place = [int(i) for i in np.unravel_index(at, arrays[name].shape)]
    assert f"{value} at {place}" in str(caught.value)
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("change", ["huge", "heads"])
def test_a_checkpoint_that_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, change: str
) -> None:
    config, arrays = weights_of("tiny-llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    if change == "huge":
        arrays[name][3, 5] = 1e30
    else:
        name, config["num_key_value_heads"] = "heads", 3
        for layer in (0, 1):
            for part in "kv":
                key = f"model.layers.{layer}.self_attn.{part}_proj.weight"
                arrays[key] = np.zeros((96, 128), np.float32)
    folder = write_folder(tmp_path / "checkpoint", config, arrays)
    with pytest.raises(BundleError, match=name):
        export_bundle(settings(folder, tmp_path / "out"))
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"group_size": 128}, "down_proj has 192 columns.*32 or 64"),
        ({"lora_targets": "q_proj,w_proj"}, "w_proj.*q_proj"),
    ],
)
def test_settings_that_do_not_fit_name_the_way_out(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_bundle(settings("random:tiny-llama", tmp_path / "out", **more))
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "bits", "stored"),
    [
        ("float32", 32, "float32"),
        ("bfloat16", 32, "float32"),
        ("float32", 16, "bfloat16"),
        ("bfloat16", 16, "bfloat16"),
        ("float16", 16, "float16"),
    ],
)
def test_a_model_in_floating_point_has_the_values_of_its_checkpoint(
    tmp_path: Path, source: str, bits: int, stored: str
) -> None:
    config, arrays = weights_of("tiny-llama")
    typed = {name: mx.array(a).astype(getattr(mx, source)) for name, a in arrays.items()}
    folder = write_folder(tmp_path / "checkpoint", config, typed)
    made = export_bundle(settings(folder, tmp_path / "out", bits=bits))
    made.verify()
    blob = (made.path / WEIGHTS).read_bytes()
    for name, matrix in made.manifest.matrices.items():
        assert (matrix.layout, matrix.bits, matrix.packed.dtype) == ("float", bits, stored)
        expected = typed[f"{name}.weight"]
        nearest = expected.astype(getattr(mx, stored))
        words = nearest.view(mx.uint16) if stored == "bfloat16" else nearest
        place = matrix.packed
        assert blob[place.offset : place.offset + place.nbytes] == np.array(words).tobytes()
        lost = np.array((expected - nearest).astype(mx.float32), np.float64)
        if not lost.any():
            assert matrix.error == {}
            continue
        norm = np.linalg.norm(np.array(expected, np.float64))
        assert matrix.error["relative_rms"] == pytest.approx(np.linalg.norm(lost) / norm)
        assert matrix.error["rms"] == pytest.approx(np.sqrt(np.square(lost).mean()))
        assert matrix.error["max"] == pytest.approx(np.abs(lost).max())
    assert all(matrix.error for matrix in made.manifest.matrices.values()) == (
        (source, bits) == ("float32", 16)
    )


@pytest.mark.parametrize(("bits", "embedding", "expected"), [(16, None, 16), (8, 16, 16)])
def test_the_embedding_has_the_bits_of_the_layers_unless_others_are_given(
    tmp_path: Path, bits: int, embedding: int | None, expected: int
) -> None:
    given = settings("random:tiny-llama", tmp_path / "out", bits=bits, embedding_bits=embedding)
    found = {name: m.bits for name, m in export_bundle(given).manifest.matrices.items()}
    assert found.pop("model.embed_tokens") == found.pop("lm_head") == expected
    assert set(found.values()) == {bits}


def test_float16_is_taken_only_where_it_holds_every_value(
    tmp_path: Path, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "SLICE_VALUES", 1000)
    config, arrays = weights_of("tiny-llama")
    typed = {name: a.astype(np.float16).astype(np.float32) for name, a in arrays.items()}
    large, name = 1e6, "model.layers.0.mlp.up_proj"
    flat = typed[f"{name}.weight"].reshape(-1)
    flat[int(rng.integers(flat.size))] = large
    folder = write_folder(tmp_path / "checkpoint", config, typed)
    matrices = export_bundle(settings(folder, tmp_path / "out", bits=16)).manifest.matrices
    assert matrices.pop(name).packed.dtype == "bfloat16"
    assert {matrix.packed.dtype for matrix in matrices.values()} == {"float16"}


def test_values_beyond_a_type_are_refused_with_a_way_out(tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-llama")
    name = "model.layers.0.mlp.up_proj.weight"
    arrays[name][3, 5] = np.finfo(np.float32).max
    folder = write_folder(tmp_path / "checkpoint", config, arrays)
    with pytest.raises(BundleError, match=rf"{name} .*too large for bfloat16.*--bits 32"):
        export_bundle(settings(folder, tmp_path / "out", bits=16))
    assert export_bundle(settings(folder, tmp_path / "out", bits=32)).manifest


def test_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    if mx.is_available(mx.gpu):
        assert graph_files.set_device("gpu") == "gpu"
        graph_files.set_device("cpu")
        return
    with pytest.raises(UsageError, match="no GPU"):
        export_bundle(settings("random:tiny-llama", tmp_path / "out", device="gpu"))
    assert listing(tmp_path) == []


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", ["symmetric", "affine"])
def test_values_are_those_that_mlx_dequantizes(
    rng: np.random.Generator, bits: int, layout: str
) -> None:
    codes = rng.integers(0, 2**bits, (6, 128)).astype(np.uint8)
    words = words_of(codes, bits)
    assert (codes_of(words, bits) == codes).all()
    scales = rng.normal(size=(6, 4)).astype(np.float32)
    biases = rng.normal(size=(6, 4)).astype(np.float32) if layout == "affine" else None
    found = QuantizedRows(words, scales, biases).values(
        QuantizedForm(bits, 32, "affine" if layout == "affine" else "symmetric", "float32")
    )
    shift = -(2.0 ** (bits - 1)) * scales if biases is None else biases
    arrays = (mx.array(words), mx.array(scales), mx.array(shift.astype(np.float32)))
    expected = np.array(mx.dequantize(*arrays, group_size=32, bits=bits))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bits_per_weight_counts_scales_and_biases() -> None:
    assert QuantizedForm(4, 64, "symmetric", "float16").bits_per_weight == 4.25
    assert QuantizedForm(4, 32, "affine", "float32").bits_per_weight == 6


def test_the_graphs_are_those_of_the_export(origin: Bundle, tmp_path: Path) -> None:
    trace_graphs(origin.manifest, "cpu", tmp_path)
    traced = read_traced(tmp_path)
    assert traced.block_types == origin.manifest.block_types
    signatures = [
        {key: (g.inputs, g.outputs, g.workspace_bytes) for key, g in graphs.items()}
        for graphs in (traced.graphs, origin.manifest.graphs)
    ]
    assert signatures[0] == signatures[1]
    files = {one.file for one in traced.graphs.values()}
    assert set(listing(tmp_path)) == {RECORD, "graphs", *files}


def lies() -> Iterator[tuple[str, Any]]:
    yield "family", "llama"
    yield "family", "no such"
    yield "family", "..pack"
    yield "config/num_hidden_layers", 3
    yield "config/num_hidden_layers", 10**9
    yield "config/num_attention_heads", 3
    yield "config/intermediate_size", 256
    yield "config/hidden_size", "128"
    yield "config/hidden_size", -1
    yield "config", {}


@pytest.mark.parametrize(("where", "value"), list(lies()), ids=repr)
def test_a_configuration_of_another_model_is_refused(
    origin: Bundle, tmp_path: Path, where: str, value: Any
) -> None:
    document = msgspec.to_builtins(origin.manifest)
    put(document, where, value)
    with pytest.raises(BundleError):
        trace_graphs(msgspec.convert(document, Manifest), "cpu", tmp_path)
    assert listing(tmp_path) == []


TENSOR = "model.layers.1.mlp.up_proj"  # when it is written, others have been and more will be


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "graphs"), (signal.SIGTERM, TENSOR)],
)
def test_interrupted_exports_leave_nothing(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    done = struck(number, moment, "export", "random:tiny-llama", "-o", tmp_path / "bundle")
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_replaced_by_the_next(tmp_path: Path) -> None:
    output, partial = tmp_path / "bundle", tmp_path / ".bundle.partial" / "new"
    done = struck(signal.SIGKILL, TENSOR, "export", "random:tiny-qwen2", "-o", output)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert partial.is_dir() and not output.exists()
    succeeds("export", "random:tiny-llama", "-o", output, "--seq-lens", "16", by=here)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_refusals(tmp_path: Path) -> None:
    unsupported = write_folder(tmp_path / "mamba", {"model_type": "mamba"}, {"x": np.zeros(2)})
    output = tmp_path / "bundle"
    cases = [
        ([unsupported], 4, "mamba"),
        (["random:tiny-nothing"], 2, "tiny"),
        (["random:tiny-llama", "--bits", "3"], 2, "bits"),
        (["random:tiny-llama", "--lora-targets", "nope_proj", "--seq-lens", "16"], 2, "q_proj"),
        (["random:tiny-llama", "--frobnicate"], 2, "frobnicate"),
    ]
    for arguments, code, said in cases:
        refuses(code, said, "export", *arguments, "-o", output)
        assert not output.exists() and not (tmp_path / ".bundle.partial").exists(), arguments
    words = ("export", "random:tiny-llama", "-o", output, "--seq-lens", "16")
    succeeds(*words, by=here)
    refuses(2, "--force", *words)


@pytest.mark.skipif(sys.platform != "linux", reason="MLX compiles with g++ on Linux alone")
def test_an_export_needs_no_compiler(tmp_path: Path) -> None:
    """MLX's g++ takes seconds, and newer ones refuse its sources."""
    compiler, calls = tmp_path / "g++", tmp_path / "calls"
    # as one that is there, and fails to compile
    compiler.write_text(f"#!/bin/sh\necho $@ >> {calls}\n[ $1 = --version ]\n")
    compiler.chmod(0o755)
    done = ondevice(
        "export",
        "random:tiny-qwen2",
        "--seq-lens=32",
        "-o",
        tmp_path / "bundle",
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (done.returncode, calls.exists()) == (0, False), done.stderr
