"""Checkpoints that are exported: GGUF files, and folders of safetensors with a configuration."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGUFReader
from support.checkpoints import weights_of, write_folder
from support.gguf_files import write_gguf
from support.mutations import Rng, mutate, pick

from export.sources.gguf_file import GGUFFile
from export.sources.safetensors_files import SafetensorsFile
from fuzz.kind import Change, Kind, Read, alter, damage, put_in_place, sha256, write
from fuzz.kinds.bundles import exported
from runtime.bundle.store import WEIGHTS

FILE = "model.gguf"
TENSORS, CONFIG = "model.safetensors", "config.json"
HEADER_BYTES = 4096  # where most changes of a GGUF file are made
BUNDLE = "bundle"


def _exported(source: Path) -> Read:
    """Export a checkpoint; what an untouched one gives is always the same."""
    code = exported(source, Path(BUNDLE))
    return Read(code, None if code else sha256(Path(BUNDLE) / WEIGHTS))


def _replaced(name: str, old: bytes, new: bytes) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        data = (folder / name).read_bytes()
        if old not in data:
            raise ValueError(f"{name} holds no {old!r}")
        (folder / name).write_bytes(data.replace(old, new, 1))

    return changed


def _overwritten(name: str, before: bytes, new: bytes) -> Change:
    """What follows `before` is overwritten, whatever it is."""

    def changed(folder: Path, rng: Rng) -> None:
        data = (folder / name).read_bytes()
        if before not in data:
            raise ValueError(f"{name} holds no {before!r}")
        start = data.index(before) + len(before)
        (folder / name).write_bytes(data[:start] + new + data[start + len(new) :])

    return changed


# --- GGUF -------------------------------------------------------------------------------------


def _head(tensors: int, keys: int, rest: bytes = b"") -> Change:
    """A file that is nothing but a header."""
    return write(FILE, struct.pack("<4sIQQ", b"GGUF", 3, tensors, keys) + rest)


def _key(type_: int, value: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"x" + struct.pack("<I", type_) + value


class GGUF(Kind):
    """GGUF files; what is read agrees with what the gguf library reads."""

    name = "gguf"
    originals = ("qwen2", "gemma3")
    known: ClassVar[dict[str, Change]] = {
        "countless tensors": _head(2**63, 0),
        "countless keys": _head(0, 2**64 - 1),
        "endless string": _head(0, 1, _key(8, struct.pack("<Q", 2**63))),
        "endless array": _head(0, 1, _key(9, struct.pack("<IQ", 4, 2**62))),
        "endless array of strings": _head(0, 1, _key(9, struct.pack("<IQ", 8, 2**40))),
        "arrays inside arrays": _head(0, 1, _key(9, struct.pack("<IQ", 9, 1) * 1000)),
        "alignment 0": _head(
            0, 1, struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0)
        ),
        "countless layers": _overwritten(
            FILE, b"block_count" + struct.pack("<I", 4), struct.pack("<I", 2**32 - 1)
        ),
        "endless embedding": _replaced(
            FILE,
            b"embedding_length" + struct.pack("<I", 4),
            b"embedding_length" + struct.pack("<I", 6),
        ),
    }

    def prepare(self, folder: Path) -> None:
        for family in self.originals:
            (folder / family).mkdir()
            write_gguf(folder / family / FILE, *weights_of(f"tiny-{family}"))

    def change(self, folder: Path, rng: Rng) -> object:
        if rng.random() < 0.03:
            return put_in_place(folder / FILE, rng)
        upto = HEADER_BYTES if rng.random() < 0.9 else None
        return [damage(folder / FILE, rng, upto) for _ in range(pick(rng, (1, 1, 2)))]

    def read(self, folder: Path, original: Path) -> Read:
        path = folder / FILE
        if path.is_file():
            _agrees_with_library(path)
        return _exported(path)


def _agrees_with_library(path: Path) -> None:
    """Compare every tensor's bytes, where both readers take the file."""
    ours = GGUFFile(path)
    try:
        theirs = {one.name: one for one in GGUFReader(path).tensors}
    except Exception:  # it raises whatever NumPy or struct raises
        return
    for name in ours.tensors.keys() & theirs.keys():
        stored = ours.stored_rows(name, slice(None)).tobytes()
        expected = np.ascontiguousarray(theirs[name].data).tobytes()
        if stored != expected:
            raise AssertionError(f"{name} has other bytes than the gguf library reads")


# --- safetensors ------------------------------------------------------------------------------


def tensors_start(data: bytes) -> int:
    """Where the tensors of a safetensors file begin."""
    return 8 + int(struct.unpack("<Q", data[:8])[0])


def _header(change: Callable[[dict[str, Any]], object]) -> Change:
    """A header that is changed, with its length made right."""

    def changed(folder: Path, rng: Rng) -> None:
        path = folder / TENSORS
        data = path.read_bytes()
        start = tensors_start(data)
        document = json.loads(data[8:start])
        change(document)
        text = json.dumps(document).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])

    return changed


def _raw_header(text: bytes) -> Change:
    return write(TENSORS, struct.pack("<Q", len(text)) + text)


def _first(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(document: dict[str, Any]) -> None:
        change(next(value for name, value in document.items() if name != "__metadata__"))

    return _header(changed)


def _config(**values: Any) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        config = json.loads((folder / CONFIG).read_bytes())
        (folder / CONFIG).write_text(json.dumps({**config, **values}))

    return changed


class Safetensors(Kind):
    """Folders of config.json and a safetensors file; tensors lie where the header says."""

    name = "safetensors"
    originals = ("qwen2", "gemma3")
    known: ClassVar[dict[str, Change]] = {
        "endless header": write(TENSORS, struct.pack("<Q", 2**63) + b"{}"),
        "header nested beyond recursion": _raw_header(b"[" * 100_000),
        "offset 1e999": _raw_header(
            b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}'
        ),
        "dimension of 5000 digits": _raw_header(
            b'{"x": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 4]}}'
        ),
        "negative dimension": _first(lambda one: one.update(shape=[-1, -128])),
        "negative offset": _first(lambda one: one.update(data_offsets=[-4, 0])),
        "configuration nested beyond recursion": write(CONFIG, b"[" * 100_000),
        "hidden size 1e999": _replaced(CONFIG, b'"hidden_size": 128', b'"hidden_size": 1e999'),
        "hidden size of 5000 digits": _replaced(
            CONFIG, b'"hidden_size": 128', b'"hidden_size": ' + b"9" * 5000
        ),
        "countless layers": _config(num_hidden_layers=2**31),
        "no heads": _config(num_attention_heads=0),
        "rope of nothing": _config(rope_theta=0),
        "rope 1e999": _replaced(CONFIG, b'"rope_theta": ', b'"rope_theta": 1e999, "x": '),
        "epsilon is not a number": _config(rms_norm_eps=float("nan")),
        "weights are a directory": lambda folder, rng: (
            (folder / TENSORS).unlink(),
            (folder / TENSORS).mkdir(),
        )[1],
    }

    def prepare(self, folder: Path) -> None:
        for family in self.originals:
            write_folder(folder / family, *weights_of(f"tiny-{family}"))

    def change(self, folder: Path, rng: Rng) -> object:
        tensors, config = folder / TENSORS, folder / CONFIG
        act = pick(rng, ["header", "header", "document", "tensors", "config", "config", "place"])
        if act == "place":
            return put_in_place(pick(rng, (tensors, config)), rng)
        if act == "config":
            return f"{CONFIG}: {alter(config, rng)}"
        if act == "document":
            done: list[str] = []
            _header(lambda document: done.append(mutate(document, rng)))(folder, rng)
            return done
        return damage(
            tensors, rng, tensors_start(tensors.read_bytes()) if act == "header" else None
        )

    def read(self, folder: Path, original: Path) -> Read:
        if (folder / TENSORS).is_file():
            _lie_where_the_header_says(folder / TENSORS)
        return _exported(folder)


_ITEM = {"F32": "<f4", "F16": "<f2", "U32": "<u4"}


def _lie_where_the_header_says(path: Path) -> None:
    """Compare every tensor with its range of bytes."""
    ours = SafetensorsFile(path)
    data = path.read_bytes()
    start = tensors_start(data)
    header = json.loads(data[8:start])
    for name, tensor in ours.tensors.items():
        if tensor.dtype in _ITEM and tensor.shape:
            begin, end = header[name]["data_offsets"]
            expected = np.frombuffer(data[start + begin : start + end], _ITEM[tensor.dtype])
            found = tensor.rows(0, tensor.shape[0]).astype(expected.dtype)
            if found.tobytes() != expected.tobytes():
                raise AssertionError(f"{name} has other bytes than its header says")
