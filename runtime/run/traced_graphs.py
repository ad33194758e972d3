"""The graphs that run: the bundle's own where they are trusted, else graphs traced on this machine.

Graphs are code that MLX does not check, so those of a bundle from elsewhere never run. They are
traced anew from the model's configuration, in a process of their own, into the user's cache folder.
The same happens for another version of MLX or another device. The bundle stays as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import VERSION, Manifest, manifest_bytes
from runtime.bundle.store import Bundle
from runtime.bundle.traced import RECORD, read_traced
from runtime.bundle.trusted import are_trusted
from runtime.core.errors import BundleError, StorageError, UsageError
from runtime.core.files import storage_errors
from runtime.core.notes import Note, silent
from runtime.core.paths import cache_folder, is_mine
from runtime.core.version import __version__, installed_version
from runtime.data.limits import Limits
from runtime.data.process import call
from runtime.machine.backend import automatic_device, mlx_version
from runtime.operations.elementwise import Elementwise
from runtime.operations.values import dtype_of

# by its name, because this process must not load model classes
TRACING = "export.tracing_process.trace"
TRACING_S = 600  # of the CPU; a model of 4B takes 2 s for each sequence bucket
# of address space, where 0.5 GiB is usual; a GPU's driver, which comes with MLX wherever graphs are
# traced for, reserves far more of it than it uses
TRACING_BYTES, WITH_GPU_BYTES = 4 << 30, 1 << 40


def with_graphs(bundle: Bundle, device: str = "auto", note: Note = silent) -> Bundle:
    """The bundle with graphs that may run here, and with the programs that call them.

    Args:
        bundle: an open bundle.
        device: "cpu", "gpu", or "auto": the one that trusted graphs were traced for, and MLX's
            default for other bundles.
        note: is told when graphs have to be traced, which takes seconds.

    Raises:
        BundleError: they cannot be traced: the architecture is not supported, mlx-lm is not
            installed, or computes the model in another way than the bundle says.
        StorageError: the cache folder cannot be written.
        UsageError: there is no such device here.
    """
    manifest = bundle.manifest
    here = choose_device(device, manifest)
    fitting = (manifest.mlx_version, manifest.device) == (mlx_version(), here)
    complete = set(map(dtype_of, manifest.graphs)) == set(Elementwise.dtypes(here))
    if fitting and complete and are_trusted(manifest):
        return replace(bundle, graphs_path=bundle.path)
    return _traced(bundle, here, note)


def choose_device(wanted: str, manifest: Manifest) -> str:
    """The device that runs a bundle's graphs, "cpu" or "gpu"; for `wanted` see `with_graphs`.

    Raises:
        UsageError: it is not here.
    """
    if wanted == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError("--device gpu: MLX finds no GPU here; use --device cpu")
    if wanted != "auto":
        return wanted
    if manifest.device == "cpu" and are_trusted(manifest):
        return "cpu"
    return automatic_device()


def _traced(bundle: Bundle, device: str, note: Note) -> Bundle:
    """The bundle with graphs from the cache folder, traced there if need be."""
    library = installed_version("mlx_lm")
    folder = cache_folder() / "graphs" / _key(bundle.manifest, device, library)
    if (traced := _read(bundle, folder)) is not None:
        return traced
    if not library:
        fitting = (bundle.manifest.mlx_version, bundle.manifest.device) == (mlx_version(), device)
        trust = f", or, if you trust whoever made them: ondevice trust {bundle.path}"
        raise BundleError(
            f"{bundle.path} has no graphs that may run here: its own were not traced on this "
            f"machine, for its device and MLX {mlx_version()}, and mlx-lm, which could trace them, "
            f"is not installed: pip install mlx-lm{trust if fitting else ''}"
        )
    try:
        with storage_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.with_suffix(".lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note(f"waiting for another process, which traces the graphs of {bundle.path}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if (traced := _read(bundle, folder)) is None:
                note(f"tracing the graphs of {bundle.path} into {folder.parent}")
                _trace(bundle, folder, device)
                traced = _read(bundle, folder)
    except StorageError as problem:
        raise StorageError(
            f"{problem}; graphs that this machine has not traced are traced into that folder: set "
            "XDG_CACHE_HOME to another"
        ) from None
    if traced is None:
        raise BundleError(f"{folder}: another process has changed the graphs there; start again")
    return traced


def _read(bundle: Bundle, folder: Path) -> Bundle | None:
    """The bundle with the graphs of a folder; None if they are not there, or not whole."""
    if not is_mine(folder / RECORD):
        return None
    try:
        traced = read_traced(folder)
    except BundleError:
        return None  # they are traced again
    manifest = traced.put_into(bundle.manifest)
    check_manifest(manifest)
    return replace(bundle, manifest=manifest, graphs_path=folder)


def _trace(bundle: Bundle, folder: Path, device: str) -> None:
    """Trace into a folder beside `folder`, and move it there when it is whole."""
    with storage_errors(folder):
        if folder.exists():
            shutil.rmtree(folder)
        for old in folder.parent.glob(f"{folder.name}.*.partial"):  # of a process that was killed
            shutil.rmtree(old, ignore_errors=True)
        part = Path(tempfile.mkdtemp(".partial", f"{folder.name}.", folder.parent))
    most_bytes = WITH_GPU_BYTES if mx.is_available(mx.gpu) else TRACING_BYTES
    try:
        call(
            TRACING,
            f"tracing the graphs of {bundle.path}",
            manifest_bytes(bundle.manifest).decode(),  # its file may change meanwhile
            *(bundle.path, device, part),
            limits=Limits(most_bytes, TRACING_S),
            failure=BundleError,
        )
        with storage_errors(folder):
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _key(manifest: Manifest, device: str, library: str) -> str:
    """The name of the folder of a model's graphs: equal for all bundles of that model."""
    own = f"{__version__}, format {VERSION}"
    versions = {"mlx": mlx_version(), "mlx_lm": library, "ondevice": own}
    dtypes = ",".join(Elementwise.dtypes(device))  # of the arrays that graphs take and return
    model = (manifest.family, manifest.config, manifest.buckets, dtypes, device, versions)
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()
