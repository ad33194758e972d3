"""The bundle's bytes: what is written is what the README says, and what any reader finds."""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import whole_model as reference
from support.bundles import Tiny, manifest_of, settings
from support.checkpoints import weights_of
from support.files import listing

from export.bundle import export_bundle
from runtime.arrays.stored import Extent
from runtime.bundle.manifest import block_range, manifest_bytes
from runtime.bundle.store import MANIFEST, WEIGHTS, Bundle, BundleWriter, open_bundle
from runtime.storage.weights import Weights


def test_manifest_to_the_byte(origin: Bundle) -> None:
    text = (origin.path / MANIFEST).read_bytes()
    start = b'{\n "format": "ondevice-bundle",\n "version": 6,\n "mlx_version": "'
    assert text.startswith(start)
    document = json.loads(text)
    assert list(document) == [
        "format", "version", "mlx_version", "device", "family", "config", "hidden_size",
        "vocab_size", "lora", "buckets", "weights_nbytes", "weights_sha256", "matrices", "vectors",
        "block_types", "blocks", "graphs", "files", "provenance",
    ]  # fmt: skip
    assert text == json.dumps(document, indent=1).encode()
    assert document["family"] == "qwen2"
    assert (document["hidden_size"], document["vocab_size"]) == (128, 320)
    assert document["lora"] == {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
    assert document["buckets"] == [16]
    embedding = document["matrices"]["model.embed_tokens"]
    assert list(embedding) == [
        "rows", "columns", "bits", "group_size", "layout", "packed", "scales", "biases", "error",
    ]  # fmt: skip
    assert embedding["packed"] == {
        "offset": 0, "nbytes": 320 * 128 // 2, "dtype": "uint32", "shape": [320, 16],
    }  # fmt: skip
    assert embedding["scales"] == {
        "offset": 20480, "nbytes": 320 * 2 * 2, "dtype": "float16", "shape": [320, 2],
    }  # fmt: skip
    assert embedding["biases"] == {**embedding["scales"], "offset": 20480 + 320 * 2 * 2}
    assert document["blocks"] == [
        {"name": "", "type": "embed"},
        {"name": "model.layers.0", "type": "layer0"},
        {"name": "model.layers.1", "type": "layer0"},
        {"name": "", "type": "head"},
    ]
    assert document["block_types"]["embed"] == {
        "name": "embed", "input": "", "output": "e", "values": {"e": [1, "T", 128]},
        "parameters": {},
        "operations": [{"op": "embedding", "outputs": ["e"], "matrix": "model.embed_tokens"}],
    }  # fmt: skip
    assert set(listing(origin.path)) == {
        MANIFEST, WEIGHTS, "graphs", "tokenizer", *document["files"],
        *(graph["file"] for graph in document["graphs"].values()),
    }  # fmt: skip


def test_manifest_is_read_as_it_was_written(origin: Bundle) -> None:
    opened = open_bundle(origin.path)
    assert opened.manifest == origin.manifest
    assert manifest_bytes(opened.manifest) == (origin.path / MANIFEST).read_bytes()
    opened.verify()


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_any_reader_of_the_format_finds_the_weights(tiny: Tiny, bits: int, group: int) -> None:
    """A reader of its own, from the README's words: JSON, offsets, lowest bits first."""
    bundle = tiny("llama", bits=bits, group_size=group)
    blob = (bundle.path / WEIGHTS).read_bytes()
    document = manifest_of(bundle.path)
    assert len(blob) == document["weights_nbytes"]
    assert hashlib.sha256(blob).hexdigest() == document["weights_sha256"]
    _, original = weights_of("tiny-llama")

    def tensor(extent: dict[str, Any]) -> np.ndarray:
        raw = blob[extent["offset"] : extent["offset"] + extent["nbytes"]]
        return np.frombuffer(raw, np.dtype(extent["dtype"]).newbyteorder("<")).reshape(
            extent["shape"]
        )

    weights = Weights(bundle)
    for name, matrix in document["matrices"].items():
        bits = matrix["bits"]
        words, scales = tensor(matrix["packed"]), tensor(matrix["scales"]).astype(np.float64)
        biases = -(2.0 ** (bits - 1)) * scales
        if matrix["layout"] == "affine":
            biases = tensor(matrix["biases"]).astype(np.float64)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        codes = ((words[:, :, None] >> shifts) & (2**bits - 1)).reshape(*scales.shape, group)
        values = (codes * scales[..., None] + biases[..., None]).reshape(len(words), -1)
        by_mlx = reference.dequantized(weights, bundle.manifest.matrices[name])
        np.testing.assert_allclose(np.array(by_mlx), values, rtol=1e-6, atol=1e-7)
        source = original[f"{name}.weight"]
        error = np.linalg.norm(values - source) / np.linalg.norm(source)
        assert error == pytest.approx(matrix["error"]["relative_rms"], rel=1e-3)
        assert error < {4: 0.12, 8: 0.01}[bits]
    for name, extent in document["vectors"].items():
        assert (tensor(extent) == original[name]).all()


def test_tensors_are_aligned_and_a_block_lies_together(tiny: Tiny) -> None:
    bundle = tiny("qwen2")
    manifest = bundle.manifest
    for matrix in manifest.matrices.values():
        for part in (matrix.packed, matrix.scales):
            assert part.offset % 64 == 0
    ranges = [block_range(manifest, block) for block in manifest.blocks]
    assert all(start % 16384 == 0 for start, _ in ranges[:-1])
    for (_, stop), (start, _) in pairwise(ranges[:-1]):
        assert 0 <= start - stop < 16384
    assert manifest.weights_nbytes % 16384 == 0


def test_writer_lays_out_to_the_byte(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "out") as writer:
        writer.align_block()
        assert writer.tensor([b"abc", b"defgh"], "uint32", (2,)) == Extent(0, 8, "uint32", (2,))
        second = writer.tensor([b"\1\2\3\4"], "float32", (1,))
        writer.align_block()
        third = writer.tensor(iter([b"xy"]), "float16", (1,))
        nbytes, digest = writer.finish_weights()
        blob = (writer.folder / WEIGHTS).read_bytes()
    assert second == Extent(64, 4, "float32", (1,))
    assert third == Extent(16384, 2, "float16", (1,))
    assert blob == b"abcdefgh" + bytes(56) + b"\1\2\3\4" + bytes(16384 - 68) + b"xy"
    assert (nbytes, digest) == (len(blob), hashlib.sha256(blob).hexdigest())
    assert listing(tmp_path) == []  # never committed


def test_the_same_checkpoint_gives_the_same_bytes(origin: Bundle, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export_bundle(settings("random:tiny-qwen2", tmp_path / name))
    one, two = (open_bundle(tmp_path / name) for name in ("one", "two"))
    assert one.manifest.weights_sha256 == two.manifest.weights_sha256
    assert one.manifest.weights_sha256 == origin.manifest.weights_sha256
    assert one.manifest.matrices == two.manifest.matrices == origin.manifest.matrices
    assert one.manifest.block_types == two.manifest.block_types
