"""The graph files of a bundle: written by an export, or traced again from its manifest."""

from __future__ import annotations

import errno
from importlib import metadata
from pathlib import Path

import mlx.core as mx

from export.cut.graphs import TracedFunction
from export.cut.model import Cut, cut_model
from export.cut.trace import serialize
from export.sources.model_classes import model_module
from runtime.arrays.stored import Graph
from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import Manifest
from runtime.bundle.store import GRAPHS
from runtime.bundle.traced import RECORD, TracedGraphs, check_programs, traced_bytes
from runtime.core.errors import BundleError, UsageError
from runtime.core.files import flush_path, sha256_file, storage_errors, write_atomic
from runtime.core.notes import Progress, no_progress
from runtime.machine.backend import automatic_device
from runtime.operations.values import DECODED_TOKENS, graph_key


def set_device(name: str) -> str:
    """Choose the device to trace graphs for: "cpu", "gpu", or "auto".

    Returns which of "cpu" and "gpu" it is.
    """
    if name == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError(
            "--device gpu: MLX finds no GPU here, and graphs are traced on the device that runs "
            "them; use --device cpu, or export where there is a GPU"
        )
    device = automatic_device() if name == "auto" else name
    mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)
    return device


def trace_graphs(manifest: Manifest, device: str, folder: Path) -> None:
    """Trace a model's graphs into `folder`, for its sequence buckets, and write their record.

    Raises:
        BundleError: the architecture is not supported, or the model has other programs here than
            the bundle's manifest says.
    """
    model_module(manifest.family, "the bundle")
    if (said := manifest.config.get("num_hidden_layers")) != len(manifest.layers):
        raise BundleError(
            f"the bundle has {len(manifest.layers)} layers, its configuration says {said!r:.40}"
        )
    here = set_device(device)
    cut = cut_model(manifest.family, manifest.config)
    check_programs(manifest, cut.block_types, tuple(cut.blocks))
    graphs = write_graphs(cut, manifest.buckets, here, folder, no_progress)
    traced = TracedGraphs(metadata.version("mlx"), here, cut.block_types, tuple(cut.blocks), graphs)
    check_manifest(traced.put_into(manifest))
    write_atomic(folder / RECORD, traced_bytes(traced))


def write_graphs(
    cut: Cut, buckets: tuple[int, ...], device: str, folder: Path, progress: Progress
) -> dict[str, Graph]:
    """Serialize every elementwise graph into `folder`: for buckets on a device, and to decode."""
    graphs: dict[str, Graph] = {}
    for index, graph in enumerate(cut.graphs):
        operation = graph.operation
        lengths = {n for bucket in buckets for n in operation.graph_lengths(bucket, device)}
        functions = {(direction, n) for direction in ("forward", "vjp") for n in lengths}
        decoding = {(operation.decoding_direction, tokens) for tokens in DECODED_TOKENS}
        for dtype in operation.dtypes(device):
            for direction, length in sorted(
                functions | (decoding if dtype == "float32" else set())
            ):
                key = graph_key(operation.graph, direction, length, dtype)
                function, stem = graph.functions[direction], f"{GRAPHS}/{key}"
                graphs[key] = _write_graph(function, length, dtype, folder, stem)
        progress("graphs", index + 1, len(cut.graphs))
    return graphs


def _write_graph(
    function: TracedFunction, length: int, dtype: str, folder: Path, stem: str
) -> Graph:
    inputs, traced = function.probes(length, dtype), function.trace(length, dtype)
    name = f"{stem}.mlxfn"
    path = folder / name
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # the function has been traced: only the file can fail, and is whole if it loads
            serialize(path, function.call, inputs, function.differentiated)
            mx.import_function(str(path))
        except RuntimeError as problem:
            raise OSError(errno.ENOSPC, str(problem)) from None
        flush_path(path)
    return Graph(
        name,
        path.stat().st_size,
        sha256_file(path),
        tuple(tuple(a.shape) for a in inputs),
        traced.output_shapes,
        traced.workspace_bytes,
        traced.allocated_bytes,
        traced.views,
    )
