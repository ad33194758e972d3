"""Bundles from elsewhere whose checksums are made right: manifests, graphs and all other files."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from support.bundles import manifest_of, put, rewrite
from support.mutations import Rng, mutate, mutate_alike, mutate_bytes, pick
from support.runs import adapter, train_arguments

from fuzz.kind import Change, Kind, Read, damage, ondevice, put_in_place, sha256, strict_json
from runtime.bundle.manifest import manifest_bytes
from runtime.bundle.store import MANIFEST, WEIGHTS, open_bundle
from runtime.core.files import sha256_file

FAMILIES = ("qwen2", "gemma3")
STEPS = 2
BUDGET = "2GB"  # nothing here depends on how large the process is that forks


class _Bundles(Kind):
    """Tiny bundles, which are trained from for two steps."""

    originals = FAMILIES
    made_by = "bundle"

    def prepare(self, folder: Path) -> None:
        for family in FAMILIES:
            export(f"random:tiny-{family}", folder / family)

    def read(self, folder: Path, original: Path) -> Read:
        run = Path("run").absolute()
        code = ondevice(*train_arguments(folder, run, STEPS, budget=BUDGET))
        if code:
            return Read(code)
        return Read(code, facts_of(run), self.is_free(folder, original))

    def is_free(self, folder: Path, original: Path) -> bool:
        """Whether a changed bundle may well give other results."""
        return _model(folder) != _model(original)


def _model(folder: Path) -> bytes:
    """What a bundle says of its model; graphs and the programs that call them follow from it."""
    manifest = open_bundle(folder).manifest
    notes = {"files": {}, "provenance": {}, "quality": None, "device": "", "mlx_version": ""}
    traced = {"block_types": {}, "graphs": {}}
    return manifest_bytes(msgspec.structs.replace(manifest, **notes, **traced))


def exported(source: object, output: Path) -> int:
    """Export a checkpoint at one short sequence bucket. Returns the exit code."""
    given = {"output": output, "seq-lens": 24, "device": "cpu"}
    return ondevice("export", source, *(f"--{name}={value}" for name, value in given.items()))


def export(source: object, output: Path) -> None:
    """Export what can be exported."""
    if code := exported(source, output):
        raise RuntimeError(f"{source} is not exported: exit code {code}")


def facts_of(run: Path) -> list[Any]:
    """What two equal runs have in common: the adapter's bytes and the losses."""
    strict_json(run / "summary.json")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [hashlib.sha256(adapter(run)).hexdigest(), [json.loads(line)["loss"] for line in lines]]


# --- manifests --------------------------------------------------------------------------------


def _document(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        document = manifest_of(folder)
        change(document)
        rewrite(folder, document)

    return changed


def _text(change: Callable[[bytes], bytes]) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        rewrite(folder, change((folder / MANIFEST).read_bytes()))

    return changed


def _set(where: str, value: Any) -> Change:
    return _document(lambda document: put(document, where, value))


def _dimension(text: bytes) -> bytes:
    return text.replace(b'"hidden_size": 128', b'"hidden_size": 1e999')


def _empty_vectors(document: dict[str, Any]) -> None:
    empty = {"offset": 0, "nbytes": 0, "dtype": "float32", "shape": [0]}
    document["vectors"] |= {f"v{number}": empty for number in range(300_000)}


class Manifests(_Bundles):
    """Manifests in which one or two things are changed."""

    name = "manifest"
    known: ClassVar[dict[str, Change]] = {
        "nested deeply": _set("provenance", json.loads("[" * 900 + "]" * 900)),
        "nested beyond recursion": _text(lambda text: b"[" * 100_000 + text),
        "configuration nested beyond recursion": _text(
            lambda text: text.replace(
                b'"config": {', b'"config": {"x": ' + b"[" * 50_000 + b"]" * 50_000 + b",", 1
            )
        ),
        "dimension 1e999": _text(_dimension),
        "dimension of 400 digits": _set("hidden_size", 10**400),
        "300,000 empty vectors": _document(_empty_vectors),
        "45 MB of provenance": _set("provenance/text", "x" * 45_000_000),
        "a million numbers of provenance": _set("provenance/list", [0] * 1_000_000),
        "long file name": _set("graphs/layer0.0.forward.24/file", "graphs/" + "x" * 5000),
        "long key": _document(lambda found: found["files"].update({"tokenizer/" + "x" * 250: {}})),
        "long matrix name": _document(
            lambda found: found["matrices"].update({"x" * 100_000: next(iter(found["matrices"]))})
        ),
        "not UTF-8": _text(lambda text: text.replace(b'"qwen2"', b'"\xff\xfe"')),
        "empty": _text(lambda text: b""),
        "a number": _text(lambda text: b"17"),
        "huge bucket": _set("buckets", [1 << 20]),
    }

    def change(self, folder: Path, rng: Rng) -> object:
        if rng.random() < 0.1:
            text, done = mutate_bytes((folder / MANIFEST).read_bytes(), rng)
            rewrite(folder, text)
            return done
        original = manifest_of(folder)
        # free text and large tables, where most random places would be otherwise
        aside = [
            name for name in ("config", "provenance", "graphs", "files") if rng.random() < 0.75
        ]
        document = {name: value for name, value in original.items() if name not in aside}
        done = [
            pick(rng, (mutate, mutate_alike))(document, rng) for _ in range(pick(rng, (1, 1, 2)))
        ]
        for name in aside:
            document.setdefault(name, original[name])
        rewrite(folder, document)
        return done


# --- graphs -----------------------------------------------------------------------------------

PRIMITIVES = (
    b"AsStrided", b"Scatter", b"Gather", b"Reshape", b"Slice", b"DynamicSlice", b"SliceUpdate",
    b"Split", b"Concatenate", b"Matmul", b"Broadcast", b"Transpose", b"AsType", b"Load", b"Reduce",
    b"Arange", b"Compiled", b"Custom", b"RandomBits", b"View", b"Unflatten", b"Pad", b"Sort",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 31, 2**31 - 1, -(2**31))


def _graph_bytes(data: bytes, others: list[bytes], rng: Rng) -> tuple[bytes, str]:
    """Other bytes in the place of a graph's."""
    act = pick(rng, ["bytes", "bytes", "header", "primitive", "number", "number", "swap", "splice"])
    if act == "swap":
        return pick(rng, others), act
    if act == "splice":
        other = pick(rng, others)
        at, to = int(rng.integers(len(data))), int(rng.integers(len(other)))
        return data[:at] + other[to:], act
    if act == "header":
        return mutate_bytes(data, rng, upto=64)
    if act == "primitive":
        # a name is stored with its length before it
        there = [name for name in PRIMITIVES if struct.pack("<Q", len(name)) + name in data]
        if there:
            old, new = pick(rng, there), pick(rng, PRIMITIVES)
            stored = struct.pack("<Q", len(old)) + old
            return data.replace(stored, struct.pack("<Q", len(new)) + new, 1), f"{old!r} to {new!r}"
    if act == "number":
        at = int(rng.integers(0, max(1, len(data) - 4)))
        number = struct.pack("<i", pick(rng, NUMBERS))
        return data[:at] + number + data[at + 4 :], f"{number!r} at {at}"
    return mutate_bytes(data, rng)


def rewrite_graph(folder: Path, key: str, data: bytes) -> None:
    """Replace a graph's file, and make its size and checksum in the manifest right."""
    document = manifest_of(folder)
    graph = document["graphs"][key]
    (folder / graph["file"]).write_bytes(data)
    graph |= {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(folder, document)


def _every_graph(write: Callable[[Path, dict[str, Any]], None]) -> Change:
    """Other functions, well formed, in the place of all graphs that a training runs."""

    def changed(folder: Path, rng: Rng) -> None:
        for key, graph in manifest_of(folder)["graphs"].items():
            write(folder / graph["file"], graph)
            rewrite_graph(folder, key, (folder / graph["file"]).read_bytes())

    return changed


def _function(make: Callable[[Any, list[Any], tuple[int, ...]], Any]) -> Change:
    """Functions that return what `make` makes of MLX, their inputs and the shape of an output."""

    def write(path: Path, graph: dict[str, Any]) -> None:
        import mlx.core as mx

        inputs = [mx.zeros(tuple(shape)) for shape in graph["inputs"]]
        shapes = [tuple(shape) for shape in graph["outputs"]]

        def function(*arrays: Any) -> list[Any]:
            return [make(mx, list(arrays), shape) for shape in shapes]

        path.unlink()
        mx.export_function(str(path), function, *inputs)

    return _every_graph(write)


def _strided(offset: int) -> Callable[[Any, list[Any], tuple[int, ...]], Any]:
    def make(mx: Any, arrays: list[Any], shape: tuple[int, ...]) -> Any:
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        return mx.as_strided(arrays[0], shape, strides, offset)

    return make


def _scattered(index: int) -> Callable[[Any, list[Any], tuple[int, ...]], Any]:
    def make(mx: Any, arrays: list[Any], shape: tuple[int, ...]) -> Any:
        found = mx.zeros(shape)
        found[mx.array([index])] = 1.0 + mx.sum(arrays[0])
        return found

    return make


def _allocating(mx: Any, arrays: list[Any], shape: tuple[int, ...]) -> Any:
    whole = mx.broadcast_to(mx.sum(arrays[0]), (1 << 15, 1 << 15)) + 1.0
    return mx.zeros(shape) + mx.sum(whole * whole.T)


def _endless(mx: Any, arrays: list[Any], shape: tuple[int, ...]) -> Any:
    found = mx.broadcast_to(mx.sum(arrays[0]), (1500, 1500)) + 1.0
    for _ in range(400):
        found = found @ found
    return mx.zeros(shape) + mx.sum(found)


def _junk(data: bytes) -> Change:
    return _every_graph(lambda path, graph: (path.unlink(), path.write_bytes(data))[0])


class Graphs(_Bundles):
    """Altered graphs, which must never run: what is trained stays as it was."""

    name = "graphs"
    known: ClassVar[dict[str, Change]] = {
        "empty": _junk(b""),
        "zeros": _junk(b"\0" * 4096),
        "ones": _junk(b"\xff" * 4096),
        "reads beyond its buffer, near": _function(_strided(64)),
        "reads beyond its buffer, far": _function(_strided(1 << 40)),
        "writes beyond its buffer, near": _function(_scattered(100)),
        "writes beyond its buffer, far": _function(_scattered(1 << 30)),
        "allocates 8 GB": _function(_allocating),
        "takes minutes": _function(_endless),
    }

    def change(self, folder: Path, rng: Rng) -> object:
        document = manifest_of(folder)
        keys = list(document["graphs"])
        others = [(folder / graph["file"]).read_bytes() for graph in document["graphs"].values()]
        done = []
        for _ in range(pick(rng, (1, 2, len(keys)))):
            key = pick(rng, keys)
            data = (folder / document["graphs"][key]["file"]).read_bytes()
            data, how = _graph_bytes(data, others, rng)
            rewrite_graph(folder, key, data)
            done.append(f"{key}: {how}")
        return done

    def is_free(self, folder: Path, original: Path) -> bool:
        return False


# --- all files --------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _weights(folder: Path, rng: Rng) -> str:
    """Other weights, whose checksum is made right."""
    done = damage(folder / WEIGHTS, rng)
    document = manifest_of(folder)
    document["weights_sha256"] = sha256(folder / WEIGHTS)
    if rng.random() < 0.5:
        document["weights_nbytes"] = (folder / WEIGHTS).stat().st_size
    rewrite(folder, document)
    return f"weights: {done}"


def _not_finite(folder: Path, rng: Rng) -> None:
    size_bytes = (folder / WEIGHTS).stat().st_size
    (folder / WEIGHTS).write_bytes(np.full(size_bytes // 2, 0x7FC0, "<u2").tobytes())
    document = manifest_of(folder)
    document["weights_sha256"] = sha256(folder / WEIGHTS)
    rewrite(folder, document)


class Bundles(_Bundles):
    """Damaged files, files that are no files, and other weights."""

    name = "bundle"
    known: ClassVar[dict[str, Change]] = {
        "manifest is a directory": lambda folder, rng: (
            (folder / MANIFEST).unlink(),
            (folder / MANIFEST).mkdir(),
        )[1],
        "weights are not finite": _not_finite,
        "no graphs": lambda folder, rng: _remove_graphs(folder),
    }

    def change(self, folder: Path, rng: Rng) -> object:
        act = pick(rng, ["weights", "weights", "damage", "place", "remove", "extra"])
        if act == "weights":
            return _weights(folder, rng)
        path = pick(rng, [*_files(folder), folder / MANIFEST])
        if act == "place":
            return put_in_place(path, rng)
        if act == "remove":
            path.unlink()
        elif act == "extra":
            (path.parent / pick(rng, ["x", ".hidden", "x" * 200])).write_bytes(rng.bytes(9))
        else:
            act = damage(path, rng)
        return f"{act}: {path.relative_to(folder)}"

    def is_free(self, folder: Path, original: Path) -> bool:
        same = sha256_file(folder / WEIGHTS) == sha256_file(original / WEIGHTS)
        return not same or super().is_free(folder, original)


def _remove_graphs(folder: Path) -> None:
    for path in (folder / "graphs").rglob("*"):
        if path.is_file():
            path.unlink()
