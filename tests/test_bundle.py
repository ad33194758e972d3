"""The bundle: its bytes, its atomicity, and an adversary who writes manifests."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conftest import listing, program_of
from test_checkpoint import weights_of, write_folder

from export import pack
from export.pack import export_bundle, retrace
from harness import reference
from ondevice.bundle import (
    MANIFEST,
    WEIGHTS,
    Bundle,
    BundleWriter,
    manifest_bytes,
    open_bundle,
    write_atomic,
)
from ondevice.config import ExportConfig
from ondevice.errors import BundleError, StorageError, UsageError
from ondevice.manifest import Extent
from runtime.adapters import Adapters
from runtime.weights import Weights

Rng = np.random.Generator
Tiny = Callable[..., Bundle]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with one rung, small enough to be copied often."""
    folder = tmp_path_factory.mktemp("origin")
    checkpoint = write_folder(folder / "checkpoint", *weights_of("tiny-qwen2"))
    (checkpoint / "tokenizer.json").write_text('{"not": "used here"}')
    return export_bundle(settings(checkpoint, folder / "bundle"))


def settings(source: object, output: Path, **more: Any) -> ExportConfig:
    given = {"seq_lens": (16,), "device": "cpu", **more}
    return ExportConfig(source=str(source), output=str(output), **given)


def copied(bundle: Bundle, folder: Path) -> Path:
    shutil.copytree(bundle.path, folder)
    return folder


def manifest_of(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_bytes())


def rewrite(path: Path, document: Any) -> None:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    (path / MANIFEST).write_bytes(text)


# --- the format -------------------------------------------------------------------------------


def test_manifest_to_the_byte(origin: Bundle) -> None:
    text = (origin.path / MANIFEST).read_bytes()
    start = b'{\n "format": "ondevice-bundle",\n "version": 1,\n "mlx_version": "'
    assert text.startswith(start)
    document = json.loads(text)
    assert list(document) == [
        "format", "version", "mlx_version", "device", "family", "config", "hidden_size",
        "vocab_size", "lora", "rungs", "weights_nbytes", "weights_sha256", "matrices", "vectors",
        "kinds", "blocks", "graphs", "files", "provenance",
    ]  # fmt: skip
    assert text == json.dumps(document, indent=1).encode()
    assert document["family"] == "qwen2"
    assert (document["hidden_size"], document["vocab_size"]) == (128, 320)
    assert document["lora"] == {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
    assert document["rungs"] == [16]
    embedding = document["matrices"]["model.embed_tokens"]
    assert list(embedding) == [
        "rows", "columns", "bits", "group_size", "layout", "packed", "scales", "error",
    ]  # fmt: skip
    assert embedding["packed"] == {
        "offset": 0, "nbytes": 320 * 128 // 2, "dtype": "uint32", "shape": [320, 16],
    }  # fmt: skip
    assert embedding["scales"] == {
        "offset": 20480, "nbytes": 320 * 2 * 2, "dtype": "float16", "shape": [320, 2],
    }  # fmt: skip
    assert document["blocks"] == [
        {"name": "", "kind": "embed"},
        {"name": "model.layers.0", "kind": "layer0"},
        {"name": "model.layers.1", "kind": "layer0"},
        {"name": "", "kind": "head"},
    ]
    assert document["kinds"]["embed"] == {
        "name": "embed", "input": "", "output": "e", "values": {"e": [1, "T", 128]},
        "parameters": {},
        "steps": [{"op": "embedding", "outputs": ["e"], "matrix": "model.embed_tokens"}],
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
    opened.check_mlx()


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 32), (8, 64)])
def test_any_reader_of_the_format_finds_the_weights(tiny: Tiny, bits: int, group: int) -> None:
    """A reader of its own, from the README's words: JSON, offsets, lowest bits first."""
    bundle = tiny("llama", bits=bits, embedding_bits=bits, group_size=group)
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
        words, scales = tensor(matrix["packed"]), tensor(matrix["scales"]).astype(np.float64)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        codes = ((words[:, :, None] >> shifts) & (2**bits - 1)).reshape(*scales.shape, group)
        values = ((codes - 2.0 ** (bits - 1)) * scales[..., None]).reshape(len(words), -1)
        by_mlx = reference.dequantized(weights, bundle.manifest.matrices[name])
        assert (np.array(by_mlx) == values).all()
        source = original[f"{name}.weight"]
        error = np.linalg.norm(values - source) / np.linalg.norm(source)
        assert error == pytest.approx(matrix["error"]["relative_rms"], rel=1e-3)
        assert error < {4: 0.12, 8: 0.01}[bits]
    for name, extent in document["vectors"].items():
        assert (tensor(extent) == original[name]).all()


def test_tensors_are_aligned_and_a_block_lies_together(tiny: Tiny) -> None:
    bundle = tiny("qwen2")
    manifest, weights = bundle.manifest, Weights(bundle)
    for matrix in manifest.matrices.values():
        for part in (matrix.packed, matrix.scales):
            assert part.offset % 64 == 0
    ranges = [weights._range(block) for block in manifest.blocks]
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
    assert one.manifest.kinds == two.manifest.kinds


# --- whole or not at all ----------------------------------------------------------------------


@pytest.mark.parametrize("problem", [ValueError, KeyboardInterrupt, SystemExit, BundleError])
def test_an_interrupted_writer_leaves_nothing(tmp_path: Path, problem: type[BaseException]) -> None:
    with pytest.raises(problem), BundleWriter(tmp_path / "out") as writer:
        writer.tensor([b"abc"], "uint32", (1,))
        writer.file("tokenizer/tokenizer.json", b"{}")
        raise problem
    assert listing(tmp_path) == []


@pytest.mark.parametrize("problem", [ZeroDivisionError, KeyboardInterrupt])
def test_an_export_interrupted_anywhere_leaves_nothing(
    tmp_path: Path, rng: Rng, problem: type[BaseException]
) -> None:
    calls: list[str] = []
    export_bundle(settings("random:tiny-qwen2", tmp_path / "whole"), lambda *a: calls.append(a[0]))
    before = listing(tmp_path)
    assert {"graphs", "model.layers.1.mlp.down_proj"} <= set(calls)
    for stop in {0, len(calls) - 1, *rng.integers(0, len(calls), 3).tolist()}:
        left = [stop]

        def progress(what: str, done: int, total: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise problem

        for force, name in ((False, "new"), (True, "whole")):
            left[0] = stop
            with pytest.raises(problem):
                export_bundle(settings("random:tiny-qwen2", tmp_path / name, force=force), progress)
            assert listing(tmp_path) == before
    open_bundle(tmp_path / "whole").verify()


def test_an_existing_destination_is_kept_unless_forced(origin: Bundle, tmp_path: Path) -> None:
    path = copied(origin, tmp_path / "bundle")
    (path / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="--force"):
        export_bundle(settings("random:tiny-llama", path))
    assert open_bundle(path).manifest == origin.manifest
    assert (path / "mine.txt").read_text() == "kept"
    export_bundle(settings("random:tiny-llama", path, force=True))
    assert open_bundle(path).manifest.family == "llama"
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_force_replaces_bundles_only(tmp_path: Path) -> None:
    folder, file, link = tmp_path / "photos", tmp_path / "notes.txt", tmp_path / "link"
    folder.mkdir()
    (folder / "one.jpg").write_bytes(b"irreplaceable")
    file.write_text("irreplaceable")
    link.symlink_to(folder)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    before = listing(tmp_path)
    for destination in (folder, file, link, dangling):
        with pytest.raises(UsageError, match="not a bundle"):
            export_bundle(settings("random:tiny-llama", destination, force=True))
    assert listing(tmp_path) == before
    (tmp_path / "empty").mkdir()
    export_bundle(settings("random:tiny-llama", tmp_path / "empty", force=True)).verify()


def test_a_destination_below_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        export_bundle(settings("random:tiny-llama", tmp_path / "file" / "bundle"))
    with pytest.raises(StorageError):
        export_bundle(settings("random:tiny-llama", tmp_path / ("long" * 100)))
    assert listing(tmp_path) == ["file"]


def test_what_a_killed_export_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".bundle.partial" / "graphs"
    left.mkdir(parents=True)
    (left / "old").write_bytes(b"old")
    export_bundle(settings("random:tiny-llama", tmp_path / "bundle")).verify()
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_a_failed_swap_restores_the_old_bundle(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(origin, tmp_path / "bundle")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(settings("random:tiny-llama", path, force=True))
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]
    assert open_bundle(path).manifest == origin.manifest


def test_write_atomic_keeps_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_atomic(file, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="disk is full"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert listing(tmp_path) == ["file"]


FULL = """
import os, resource, sys
from runtime.backend import prepare
prepare()
import export.pack as pack
from ondevice.config import ExportConfig
from ondevice.errors import StorageError

where, output = sys.argv[1:]
def fill(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

if where == "weights":
    fill(50_000)
elif where == "last bytes of the weights":
    finish = pack.BundleWriter.finish_weights
    def finished(self):
        self._write(bytes(3000))  # stays in the buffer
        fill(os.path.getsize(self.folder / "weights.bin") + 10)
        return finish(self)
    pack.BundleWriter.finish_weights = finished
elif where == "graphs":
    serialize = pack.serialize
    def serialized(*a, **k):
        fill(700)
        serialize(*a, **k)
    pack.serialize = serialized
elif where == "manifest":
    commit = pack.BundleWriter.commit
    def committed(self, manifest):
        fill(1000)
        return commit(self, manifest)
    pack.BundleWriter.commit = committed
try:
    pack.export_bundle(
        ExportConfig(source="random:tiny-qwen2", output=output, seq_lens=(16,), device="cpu")
    )
except StorageError as problem:
    sys.exit(str(problem))
"""


@pytest.mark.parametrize("where", ["weights", "last bytes of the weights", "graphs", "manifest"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, where, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 1, done
    assert done.stderr.startswith("the disk is full"), done.stderr
    assert "Traceback" not in done.stderr
    assert listing(tmp_path) == []


def test_too_little_room_is_known_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match=r"needs about .* MB, 0 MB are free"):
        export_bundle(settings("random:tiny-qwen2", tmp_path / "out"))
    assert listing(tmp_path) == []


# --- damaged checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
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


@pytest.mark.parametrize("change", ["shape", "missing", "unknown", "huge", "heads"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: str) -> None:
    config, arrays = weights_of("tiny-llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    if change == "shape":
        arrays[name] = arrays[name][:-1]
    elif change == "missing":
        del arrays[name]
    elif change == "unknown":
        name = "model.layers.0.self_attn.sinks"
        arrays[name] = np.zeros(4, np.float32)
    elif change == "huge":
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
        ({"group_size": 128}, "down_proj has 192 columns.*32, 64"),
        ({"lora_targets": "q_proj,w_proj"}, "w_proj.*q_proj"),
    ],
)
def test_settings_that_do_not_fit_name_the_way_out(
    tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_bundle(settings("random:tiny-llama", tmp_path / "out", **more))
    assert listing(tmp_path) == []


# --- damaged bundles --------------------------------------------------------------------------


def parts(bundle: Bundle) -> list[str]:
    manifest = bundle.manifest
    graph = next(iter(manifest.graphs.values())).file
    return [WEIGHTS, graph, next(iter(manifest.files)), MANIFEST]


@pytest.mark.parametrize("part", range(4))
def test_truncation_is_seen_at_once(origin: Bundle, tmp_path: Path, rng: Rng, part: int) -> None:
    name = parts(origin)[part]
    whole = (origin.path / name).read_bytes()
    path = copied(origin, tmp_path / "bundle")
    for length in (0, len(whole) - 1, int(rng.integers(1, len(whole)))):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(BundleError, match=MANIFEST if part == 3 else "truncated"):
            open_bundle(path)
    (path / name).unlink()
    with pytest.raises(BundleError, match=Path(name).name):
        open_bundle(path)


@pytest.mark.parametrize("part", range(3))
def test_a_flipped_bit_is_seen_by_verify(
    origin: Bundle, tmp_path: Path, rng: Rng, part: int
) -> None:
    path = copied(origin, tmp_path / "bundle")
    file = path / parts(origin)[part]
    blob = bytearray(file.read_bytes())
    at = int(rng.integers(len(blob)))
    blob[at] ^= 1 << int(rng.integers(8))
    file.write_bytes(blob)
    bundle = open_bundle(path)  # sizes are right
    with pytest.raises(BundleError, match=file.name):
        bundle.verify()
    if part:
        with pytest.raises(BundleError, match=file.name):
            bundle.verify_small()
    else:
        bundle.verify_small()


def test_weights_that_shrink_after_opening_are_refused(origin: Bundle, tmp_path: Path) -> None:
    bundle = open_bundle(copied(origin, tmp_path / "bundle"))
    os.truncate(bundle.weights_path, bundle.manifest.weights_nbytes - 16384)
    with pytest.raises(BundleError, match="changed its size"):
        Weights(bundle)


@pytest.mark.parametrize("name", [WEIGHTS, "graphs", "tokenizer", MANIFEST])
def test_links_out_of_the_bundle_are_refused(origin: Bundle, tmp_path: Path, name: str) -> None:
    path = copied(origin, tmp_path / "bundle")
    outside = tmp_path / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    with pytest.raises(BundleError, match="leads out of the bundle"):
        open_bundle(path)
    (path / name).unlink()
    (path / name).symlink_to(path / name)  # a loop
    with pytest.raises(BundleError):
        open_bundle(path)


def test_what_is_no_bundle_is_refused(tmp_path: Path, origin: Bundle) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / MANIFEST).mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / MANIFEST)
    for path in ("nowhere", "file", "folder", "pipe", ".", "x" * 300, "file/below"):
        with pytest.raises(BundleError):
            open_bundle(tmp_path / path)
    inner = copied(origin, tmp_path / "inner")
    (inner / WEIGHTS).unlink()
    (inner / WEIGHTS).mkdir()
    with pytest.raises(BundleError, match=WEIGHTS):
        open_bundle(inner)


TEXTS = [
    b"",
    b"\0",
    b"null",
    b"[]",
    b'"ondevice-bundle"',
    b"{}",
    b'{"format": "ondevice-bundle"}',
    b'{"format": ["ondevice-bundle"], "version": 1}',
    b'{"format": "ondevice-bundle", "version": 2}',
    b'{"format": "ondevice-bundle", "version": true}',
    b'{"format": "ondevice-bundle", "version": "1"}',
    b'{"format": "ondevice-bundle", "version": 1}',
    b"\xff\xfe\x00\x01",
    b'{"format": "\xff"}',
    b"{" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 100_000,
    b'{"format": "ondevice-bundle", "version": ' + b"1" * 5000 + b"}",
    b'{"format": "ondevice-bundle", "version": 1' + b"0" * 4000 + b"}",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:50].decode("latin-1"))
def test_documents_that_are_no_manifest(origin: Bundle, tmp_path: Path, text: bytes) -> None:
    path = copied(origin, tmp_path / "bundle")
    rewrite(path, text)
    with pytest.raises(BundleError):
        open_bundle(path)


def test_nesting_of_any_depth_is_refused(origin: Bundle, tmp_path: Path) -> None:
    path = copied(origin, tmp_path / "bundle")
    whole = (path / MANIFEST).read_bytes()
    limit = sys.getrecursionlimit()
    for depth in (*range(25, limit, 100), *range(limit - 120, limit + 5)):
        nested = b'"hidden_size": ' + b"[" * depth + b"]" * depth
        for place in (b"\n ", b"\n  "):  # the manifest's own, and its configuration's
            assert whole.count(place + b'"hidden_size": 128') == 1
            rewrite(path, whole.replace(place + b'"hidden_size": 128', place + nested))
            with pytest.raises(BundleError):
                open_bundle(path)


def put(document: Any, where: str, value: Any) -> None:
    *parents, last = where.split("/")
    for key in parents:
        document = document[int(key) if isinstance(document, list) else key]
    document[int(last) if isinstance(document, list) else last] = value


LAYER, FIRST = "kinds/layer0", "matrices/model.layers.0.mlp.up_proj"
LIES = [
    ("device", "tpu"),
    ("hidden_size", 64),
    ("hidden_size", 128.0),
    ("vocab_size", 321),
    ("vocab_size", -320),
    ("vocab_size", True),
    ("rungs", []),
    ("rungs", [0, 16]),
    ("rungs", [16, 16]),
    ("rungs", [32, 16]),
    ("rungs", [16, 32]),
    ("rungs", [1 << 62]),
    ("rungs", {"0": 16}),
    ("lora", {}),
    ("lora/rank", 0),
    ("lora/rank", True),
    ("lora/rank", 1 << 40),
    ("lora/alpha", float("nan")),
    ("lora/alpha", float("inf")),
    ("lora/alpha", 10**400),
    ("lora/alpha", 0),
    ("lora/targets", "q_proj"),
    ("lora/targets", [1]),
    ("weights_nbytes", 0),
    ("weights_nbytes", 1 << 80),
    (f"{FIRST}/bits", 5),
    (f"{FIRST}/bits", 8),
    (f"{FIRST}/group_size", 0),
    (f"{FIRST}/group_size", 32),
    (f"{FIRST}/layout", "affine"),
    (f"{FIRST}/layout", ["symmetric"]),
    (f"{FIRST}/rows", 0),
    (f"{FIRST}/rows", 10**4000),
    (f"{FIRST}/packed/offset", -64),
    (f"{FIRST}/packed/offset", 0),
    (f"{FIRST}/packed/offset", 1 << 62),
    (f"{FIRST}/packed/offset", 1),
    (f"{FIRST}/packed/nbytes", 0),
    (f"{FIRST}/packed/dtype", "object"),
    (f"{FIRST}/packed/dtype", "float32"),
    (f"{FIRST}/packed/shape", [192, "16"]),
    (f"{FIRST}/packed/shape", [1 << 62] * 4000),
    (f"{FIRST}/scales/dtype", "uint32"),
    (f"{FIRST}/biases", {"offset": 0, "nbytes": 0, "dtype": "float32", "shape": [0]}),
    ("vectors/model.norm.weight/shape", []),
    ("vectors/model.norm.weight/shape", [2, 64]),
    ("vectors/model.norm.weight/dtype", "uint32"),
    (f"{LAYER}/name", "layer1"),
    (f"{LAYER}/input", ""),
    (f"{LAYER}/output", "x"),
    (f"{LAYER}/output", "nothing"),
    (f"{LAYER}/values/x", [1, "T", 64]),
    (f"{LAYER}/values/x", [1, "T", "T"]),
    (f"{LAYER}/values/x", [1, 16, 128]),
    (f"{LAYER}/values/x", ["S", "T", 128]),
    (f"{LAYER}/values/x", [1, "T", 0]),
    (f"{LAYER}/values/out", "T"),
    (f"{LAYER}/values/~x", [1, "T", 128]),
    (f"{LAYER}/parameters/extra.weight", [128]),
    (f"{LAYER}/steps", []),
    (f"{LAYER}/steps/0/op", "exec"),
    (f"{LAYER}/steps/0/op", "head"),
    (f"{LAYER}/steps/0/graph", "layer9.0"),
    (f"{LAYER}/steps/0/graph", "layer0.2"),
    (f"{LAYER}/steps/0/inputs", ["x"]),
    (f"{LAYER}/steps/0/inputs", ["x", "@nothing"]),
    (f"{LAYER}/steps/0/vjp_inputs", ["x", "~~x"]),
    (f"{LAYER}/steps/0/vjp_outputs", ["x", "x"]),
    (f"{LAYER}/steps/1/inputs", ["@input_layernorm.weight"]),
    (f"{LAYER}/steps/1/inputs", []),
    (f"{LAYER}/steps/1/linears", []),
    (f"{LAYER}/steps/1/linears/1/output", "self_attn.q_proj.out"),
    (f"{LAYER}/steps/1/linears/1/name", "self_attn.q_proj"),
    (f"{LAYER}/steps/1/linears/1/name", "../../embed_tokens"),
    (f"{LAYER}/steps/1/linears/1/bias", 1),
    (f"{LAYER}/steps/1/window", 5),
    (f"{LAYER}/steps/3/scale", float("nan")),
    (f"{LAYER}/steps/3/scale", 0),
    (f"{LAYER}/steps/3/scale", 10**400),
    (f"{LAYER}/steps/3/window", 0),
    (f"{LAYER}/steps/3/inputs", ["attention0.q", "attention0.k"]),
    (f"{LAYER}/steps/3/inputs", ["attention0.k", "attention0.q", "attention0.v"]),
    ("kinds/embed/steps/0/matrix", "lm_head"),
    ("kinds/embed/steps/0/matrix", "model.layers.0.mlp.up_proj"),
    ("kinds/embed/steps/0/outputs", []),
    ("kinds/head/steps/1/inputs", ["x"]),
    ("kinds/head/steps/1/inputs", []),
    ("blocks", []),
    ("blocks/1/kind", "embed"),
    ("blocks/1/kind", "layer7"),
    ("blocks/1/name", "model.layers.1"),
    ("blocks/1/name", "model.layers.5"),
    ("blocks/3/kind", "layer0"),
    ("graphs/layer0.0.forward.16/file", "../secret"),
    ("graphs/layer0.0.forward.16/file", "/etc/passwd"),
    ("graphs/layer0.0.forward.16/file", "graphs/../../secret"),
    ("graphs/layer0.0.forward.16/file", "weights.bin"),
    ("graphs/layer0.0.forward.16/file", "tokenizer/tokenizer.json"),
    ("graphs/layer0.0.forward.16/file", "graphs/" + "x" * 300),
    ("graphs/layer0.0.forward.16/file", "graphs/\0"),
    ("graphs/layer0.0.forward.16/file", "graphs/nothing"),
    ("graphs/layer0.0.forward.16/nbytes", 1),
    ("graphs/layer0.0.forward.16/inputs", [[1, 16, 128]]),
    ("graphs/layer0.0.forward.16/outputs", [[1, 16, -128]]),
    ("files/..", {"nbytes": 0, "sha256": ""}),
    ("files/manifest.json", {"nbytes": 0, "sha256": ""}),
    ("files/tokenizer~1tokenizer.json", {"nbytes": 0, "sha256": ""}),
    ("files", {"tokenizer/../weights.bin": {"nbytes": 0, "sha256": ""}}),
    ("unknown", 1),
    (f"{LAYER}/unknown", 1),
    (f"{FIRST}/packed/unknown", None),
]


@pytest.mark.parametrize(("where", "value"), LIES, ids=lambda part: repr(part)[:40])
def test_lies_are_refused(origin: Bundle, tmp_path: Path, where: str, value: Any) -> None:
    path = links(origin, tmp_path / "bundle")
    document = manifest_of(origin.path)
    put(document, where, value)
    rewrite(path, document)
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    assert len(str(caught.value)) < 2000


def links(bundle: Bundle, folder: Path) -> Path:
    """A copy whose files, but for the manifest, are the bundle's own."""
    shutil.copytree(bundle.path, folder, copy_function=os.link)
    (folder / MANIFEST).unlink()
    return folder


def test_steps_and_extents_that_clash(origin: Bundle, tmp_path: Path) -> None:
    path = links(origin, tmp_path / "bundle")
    steps = manifest_of(origin.path)["kinds"]["layer0"]["steps"]
    orders = [steps + steps[-1:], steps[:-1], steps[1:], steps[::-1], [steps[3], *steps]]
    orders.append([*steps[:4], {"op": "embedding", "outputs": ["e"], "matrix": "m"}, *steps[4:]])
    for order in orders:
        document = manifest_of(origin.path)
        document["kinds"]["layer0"]["steps"] = order
        rewrite(path, document)
        with pytest.raises(BundleError):
            open_bundle(path)
    document = manifest_of(origin.path)
    one, two = (document["matrices"][f"model.layers.{i}.mlp.up_proj"] for i in range(2))
    two["scales"]["offset"] = one["scales"]["offset"]
    rewrite(path, document)
    with pytest.raises(BundleError, match="overlaps"):
        open_bundle(path)


JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2, 16, 2**31, 2**63, 2**64, 10**400, 0.5, -1e308,
    float("nan"), float("inf"), "", "x", "T", "../x", "/etc/passwd", "graphs", "\ud800", "@x", "~x",
    "a" * 300, [], {}, [[]], [None], {"a": 1}, {"": {}}, ["x", "x"], [1 << 40] * 9,
]  # fmt: skip


def children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node)
    return list(range(len(node))) if isinstance(node, list) else []


def mutate(document: Any, rng: Rng) -> str:
    """Change one thing at a random place; returns what was done."""
    node, path = document, []
    while True:
        keys = children(node)
        key = keys[rng.integers(len(keys))]
        path.append(key)
        if not children(node[key]) or rng.random() < 0.15:
            break
        node = node[key]
    act = str(rng.choice(["junk", "delete", "copy", "nudge", "rename", "swap", "repeat", "add"]))
    if act == "delete":
        del node[key]
    elif act == "copy":  # something well formed, from elsewhere
        other = document
        while children(other) and rng.random() < 0.8:
            keys = children(other)
            other = other[keys[rng.integers(len(keys))]]
        node[key] = copy.deepcopy(other)
    elif act == "nudge" and type(node[key]) is int:
        node[key] += int(rng.choice([-64, -1, 1, 64, 16384]))
    elif act == "rename" and isinstance(node, dict):
        node[str(rng.choice(["x", "", *node]))] = node.pop(key)
    elif act == "swap":
        keys = children(node)
        other = keys[rng.integers(len(keys))]
        node[key], node[other] = node[other], node[key]
    elif act == "repeat" and isinstance(node, list):
        node.insert(int(rng.integers(len(node) + 1)), copy.deepcopy(node[key]))
    elif act == "add" and isinstance(node[key], dict):
        node[key][str(rng.choice(["x", "biases", "window", "scale"]))] = JUNK[
            rng.integers(len(JUNK))
        ]
    else:
        act, node[key] = "junk", JUNK[rng.integers(len(JUNK))]
    return f"{act} at {path}"


def runs(path: Path, rng: Rng) -> None:
    """Run a bundle, forward and backward: an accepted manifest may only fail as a BundleError."""
    bundle = open_bundle(path)
    manifest = bundle.manifest
    program = program_of(bundle, manifest.rungs[0])
    adapters = Adapters.initial(manifest, 0)
    x = program.embed(rng.integers(0, manifest.vocab_size, 5))
    for block in program.blocks[1:-1]:
        y = program.forward(block, x, adapters.loras(block))
        dx, gradients = program.backward(block, x, y, adapters.loras(block), input_too=True)
        assert dx is not None
        assert set(gradients) == set(manifest.adapted(block))
        mx.eval(dx)
        x = y
    result, dx = program.head(x, rng.integers(0, manifest.vocab_size, 3), slice(1, 4), 1.0)
    mx.eval(result.loss, dx)


def harmless(path: Path, origin: Bundle) -> bool:
    """Whether a manifest differs in nothing but names, notes and sums, which a run never reads."""
    unread = {"config": {}, "provenance": {}, "family": "", "mlx_version": "", "weights_sha256": ""}

    def read(bundle: Bundle) -> Any:
        manifest = replace(bundle.manifest, files={}, device="", **unread)
        return manifest_bytes(manifest)

    return read(open_bundle(path)) == read(origin)


def test_random_changes_are_refused_or_run(origin: Bundle, tmp_path: Path, rng: Rng) -> None:
    path = links(origin, tmp_path / "bundle")
    original = manifest_of(origin.path)
    text = json.dumps(original)
    refused = 0
    for _ in range(400):
        document = json.loads(text)
        for name in ("config", "provenance"):  # free text to a reader
            if rng.random() < 0.9:
                del document[name]
        done = mutate(document, rng)
        for name in ("config", "provenance"):
            document.setdefault(name, original[name])
        rewrite(path, document)
        try:
            open_bundle(path)
            if not harmless(path, origin):
                runs(path, rng)
        except BundleError:
            refused += 1
        except Exception as problem:
            raise AssertionError(done) from problem
    assert refused > 200


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("lora/rank", 3),
        ("lora/alpha", 0.5),
        ("lora/targets", ["q_proj", "down_proj"]),
        ("lora/targets", []),
        ("lora/targets", ["no such layer"]),
        (f"{LAYER}/steps/3/window", 5),
        (f"{LAYER}/steps/3/scale", 1e30),
        ("graphs/layer0.0.vjp.16/workspace_bytes", 1 << 62),
        ("matrices/model.layers.1.mlp.up_proj", "matrices/model.layers.0.mlp.up_proj"),
        ("blocks/1/name", "model.layers.1"),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_other_truths_run(origin: Bundle, tmp_path: Path, rng: Rng, where: str, value: Any) -> None:
    """What is well formed runs, or is refused: sharing bytes or layers is no program of ours."""
    path = links(origin, tmp_path / "bundle")
    document = manifest_of(origin.path)
    shared = where.startswith(("matrices", "blocks"))
    if where.startswith("matrices"):
        value = document["matrices"][value.removeprefix("matrices/")]
    put(document, where, value)
    rewrite(path, document)
    if shared:
        with pytest.raises(BundleError):
            open_bundle(path)
    else:
        runs(path, rng)


def test_graphs_that_are_not_what_the_manifest_says_are_refused(
    origin: Bundle, tmp_path: Path, rng: Rng
) -> None:
    """Even where sizes and checksums have been made to fit."""
    document = manifest_of(origin.path)
    keys = list(document["graphs"])
    wrong = 0
    for index, (mine, theirs) in enumerate(zip(keys, rng.permutation(keys), strict=True)):
        path = links(origin, tmp_path / str(index))
        changed = json.loads(json.dumps(document))
        for field in ("file", "nbytes", "sha256"):
            changed["graphs"][mine][field] = document["graphs"][theirs][field]
        rewrite(path, changed)
        open_bundle(path).verify()
        try:
            runs(path, rng)
        except BundleError:
            wrong += 1
        fields = ("inputs", "outputs")
        if all(document["graphs"][mine][f] == document["graphs"][theirs][f] for f in fields):
            wrong += 1  # fits, and is another function: only a checksum from elsewhere can tell
    assert wrong == len(keys)


def test_a_graph_of_noise_is_refused(origin: Bundle, tmp_path: Path, rng: Rng) -> None:
    path = copied(origin, tmp_path / "bundle")
    for graph in origin.manifest.graphs.values():
        (path / graph.file).write_bytes(rng.bytes(graph.nbytes))
    with pytest.raises(BundleError, match="cannot be loaded"):
        runs(path, rng)


# --- another MLX ------------------------------------------------------------------------------


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {
        name: (folder / name).read_bytes() for name in listing(folder) if (folder / name).is_file()
    }


def forward_of(path: Path, seed: int) -> np.ndarray:
    bundle = open_bundle(path)
    program = program_of(bundle, bundle.manifest.rungs[0])
    rng = np.random.default_rng(seed)
    x = program.embed(rng.integers(0, bundle.manifest.vocab_size, 9))
    for block in program.blocks[1:-1]:
        x = program.forward(block, x, {})
    return np.array(program.hidden(x))


def test_graphs_of_another_mlx_are_refused_and_traced_again(
    origin: Bundle, tmp_path: Path, seed: int
) -> None:
    path = copied(origin, tmp_path / "bundle")
    document = manifest_of(path)
    document["mlx_version"] = "0.1.2"
    rewrite(path, document)
    with pytest.raises(BundleError, match=rf"0\.1\.2.*ondevice retrace {path}"):
        open_bundle(path).check_mlx()
    expected = forward_of(path, seed)
    before = all_bytes(path)
    for _ in range(3):
        bundle = retrace(path, "cpu")
        bundle.check_mlx()
        bundle.verify()
        assert (forward_of(path, seed) == expected).all()
        after = all_bytes(path)
        assert len(after) == len(before)  # the old graphs are gone
        assert after[WEIGHTS] == before[WEIGHTS]
        assert bundle.manifest.matrices == origin.manifest.matrices
        assert bundle.manifest.kinds == origin.manifest.kinds


@pytest.mark.parametrize("problem", [KeyboardInterrupt, StorageError])
def test_an_interrupted_retrace_changes_nothing(
    origin: Bundle, tmp_path: Path, problem: type[BaseException]
) -> None:
    path = copied(origin, tmp_path / "bundle")
    before = all_bytes(path)

    def progress(what: str, done: int, total: int) -> None:
        if done == 3:
            raise problem

    with pytest.raises(problem):
        retrace(path, "cpu", progress)
    assert all_bytes(path) == before
    assert listing(path) == listing(origin.path)


def retrace_lies() -> Iterator[tuple[str, Any]]:
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


@pytest.mark.parametrize(("where", "value"), list(retrace_lies()), ids=repr)
def test_retrace_refuses_a_configuration_of_another_model(
    origin: Bundle, tmp_path: Path, where: str, value: Any
) -> None:
    path = copied(origin, tmp_path / "bundle")
    document = manifest_of(path)
    put(document, where, value)
    rewrite(path, document)
    before = all_bytes(path)
    with pytest.raises(BundleError):
        retrace(path, "cpu")
    assert all_bytes(path) == before


def test_a_device_that_is_not_here_is_refused(tmp_path: Path) -> None:
    if mx.is_available(mx.gpu):
        assert pack.set_device("gpu") == "gpu"
        pack.set_device("cpu")
        return
    with pytest.raises(UsageError, match="no GPU"):
        export_bundle(settings("random:tiny-llama", tmp_path / "out", device="gpu"))
    assert listing(tmp_path) == []
