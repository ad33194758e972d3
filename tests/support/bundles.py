"""Bundles for tests: exported, copied, and their manifests changed behind the writer's back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ondevice.bundle.manifest import manifest_bytes
from ondevice.bundle.store import MANIFEST, Bundle, open_bundle
from ondevice.config.export import ExportConfig

Rng = np.random.Generator
Tiny = Callable[..., Bundle]


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


def links(bundle: Bundle, folder: Path) -> Path:
    """A copy whose files, but for the manifest, are the bundle's own."""
    shutil.copytree(bundle.path, folder, copy_function=os.link)
    (folder / MANIFEST).unlink()
    return folder


def put(document: Any, where: str, value: Any) -> None:
    *parents, last = where.split("/")
    for key in parents:
        document = document[int(key) if isinstance(document, list) else key]
    document[int(last) if isinstance(document, list) else last] = value


def harmless(path: Path, origin: Bundle) -> bool:
    """Whether a manifest differs in nothing but names, notes and sums, which a run never reads."""
    unread = {"config": {}, "provenance": {}, "family": "", "mlx_version": "", "weights_sha256": ""}

    def read(bundle: Bundle) -> bytes:
        manifest = msgspec.structs.replace(bundle.manifest, files={}, device="", **unread)
        return manifest_bytes(manifest)

    return read(open_bundle(path)) == read(origin)
