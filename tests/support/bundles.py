"""Bundles for tests: exported, copied, and their manifests changed behind the writer's back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from export.config.export import ExportConfig
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import MANIFEST, Bundle, open_bundle
from runtime.run.traced_graphs import with_graphs

Rng = np.random.Generator
Tiny = Callable[..., Bundle]


def runnable(path: Path) -> Bundle:
    """The bundle there, with graphs that may run."""
    return with_graphs(open_bundle(path))


def as_it_lies(path: Path) -> Bundle:
    """The bundle there, with its own graphs, as if the user trusted them."""
    return replace(open_bundle(path), graphs_path=path)


def settings(source: object, output: Path, **more: Any) -> ExportConfig:
    given = {"seq_lens": (16,), "device": "cpu", **more}
    return ExportConfig(source=str(source), output=str(output), **given)


def copied(bundle: Bundle, folder: Path) -> Path:
    shutil.copytree(bundle.path, folder)
    return folder


def with_noise(bundle: Bundle, path: Path, rng: Rng) -> Path:
    """A copy whose graphs are noise, with sizes and checksums that say so."""
    copied(bundle, path)
    document = manifest_of(path)
    for graph in document["graphs"].values():
        noise = rng.bytes(int(rng.integers(1, 5000)))
        (path / graph["file"]).write_bytes(noise)
        graph |= {"nbytes": len(noise), "sha256": hashlib.sha256(noise).hexdigest()}
    rewrite(path, document)
    open_bundle(path).verify()
    return path


def manifest_of(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_bytes())


def rewrite(path: Path, document: Any) -> None:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    (path / MANIFEST).write_bytes(text)


def say(path: Path, where: str, value: Any) -> Path:
    """Let the manifest of the bundle there say something else in one place."""
    document = manifest_of(path)
    put(document, where, value)
    rewrite(path, document)
    return path


def links(bundle: Bundle, folder: Path) -> Path:
    """A copy whose files, but for the manifest, are the bundle's own."""
    shutil.copytree(bundle.path, folder, copy_function=os.link)
    (folder / MANIFEST).unlink()
    shutil.copyfile(bundle.path / MANIFEST, folder / MANIFEST)
    return folder


def with_operations(manifest: Manifest, name: str, of: type, **changes: Any) -> Manifest:
    """The manifest with fields of all operations of a kind changed in one block type."""
    block_type = manifest.block_types[name]
    operations = tuple(
        structs.replace(each, **changes) if isinstance(each, of) else each
        for each in block_type.operations
    )
    changed = structs.replace(block_type, operations=operations)
    return structs.replace(manifest, block_types={**manifest.block_types, name: changed})


def put(document: Any, where: str, value: Any) -> None:
    *parents, last = where.split("/")
    for key in parents:
        document = document[int(key) if isinstance(document, list) else key]
    document[int(last) if isinstance(document, list) else last] = value
