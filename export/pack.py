"""The export: cuts a checkpoint into blocks, quantizes and traces it, and writes a bundle.

Weights pass through memory one slice of a tensor at a time.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from export.cut.graphs import ElementwiseGraph
from export.cut.model import Cut, cut_model
from export.cut.trace import serialize, trace
from export.quantize.search import quantize_rows
from export.sources.open import open_checkpoint
from export.sources.source import Checkpoint
from ondevice import __version__
from ondevice.bundle.manifest import Manifest
from ondevice.bundle.store import GRAPHS, TOKENIZER, Bundle, BundleWriter
from ondevice.config.export import ExportConfig
from ondevice.errors import BundleError, StorageError, UsageError
from ondevice.files import fsync_path, sha256_file, storage_errors
from ondevice.operations.elementwise import graph_key
from ondevice.operations.tensors import FLOAT_BITS, Extent, Graph, Matrix
from ondevice.operations.values import shape_at

SLICE_VALUES = 4 << 20  # how many values of a tensor are in memory at a time
Progress = Callable[[str, int, int], None]  # (what is written, how much is done, of how much)


def no_progress(what: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def export_bundle(config: ExportConfig, progress: Progress = no_progress) -> Bundle:
    """Export `config.source` to a bundle at `config.output`.

    Raises:
        BundleError: the checkpoint is damaged or its architecture unsupported.
        StorageError: the disk is full; nothing is left behind.
        UsageError: the destination exists, or the settings do not suit the model.
    """
    checkpoint = open_checkpoint(config.source, seed=config.seed)
    try:
        with BundleWriter(Path(config.output), config.force) as writer:
            return _export(config, checkpoint, writer, progress)
    finally:
        checkpoint.close()


def _export(
    config: ExportConfig, checkpoint: Checkpoint, writer: BundleWriter, progress: Progress
) -> Bundle:
    device = set_device(config.device)
    cut = cut_model(checkpoint.family, checkpoint.config)
    targets = _lora_targets(config, cut)
    tensors = _Tensors(config, checkpoint, writer, progress)
    tensors.check_space(cut)
    tensors.write(cut)
    nbytes, digest = writer.finish_weights()
    buckets = tuple(config.seq_lens)
    graphs = write_graphs(cut, buckets, writer.folder, GRAPHS, progress)
    files = {
        f"{TOKENIZER}/{name}": writer.file(f"{TOKENIZER}/{name}", data)
        for name, data in sorted(checkpoint.tokenizer_files().items())
    }
    first = cut.blocks[0]
    (lookup,) = cut.block_types[first.type].operations[0].matrices(first.tensor)
    embedding = tensors.matrices[lookup]
    manifest = Manifest(
        mlx_version=metadata.version("mlx"),
        device=device,
        family=checkpoint.family,
        config=checkpoint.config,
        hidden_size=embedding.columns,
        vocab_size=embedding.rows,
        lora={"rank": config.lora_rank, "alpha": config.lora_alpha, "targets": targets},
        buckets=buckets,
        weights_nbytes=nbytes,
        weights_sha256=digest,
        matrices=tensors.matrices,
        vectors=tensors.vectors,
        block_types=cut.block_types,
        blocks=tuple(cut.blocks),
        graphs=graphs,
        files=files,
        provenance={
            **checkpoint.provenance,
            "exporter": f"ondevice {__version__}",
            "mlx_lm": metadata.version("mlx-lm"),
            "settings": _settings(config),
        },
    )
    return writer.commit(manifest)


def _lora_targets(config: ExportConfig, cut: Cut) -> Any:
    """The manifest's `lora.targets`. Raises UsageError for a name that no linear layer has."""
    names = config.lora_target_names
    if names is None:
        return "all-linear"
    operations = (one for block_type in cut.block_types.values() for one in block_type.operations)
    known = {name.split(".")[-1] for one in operations for name in one.adaptable}
    if unknown := sorted(set(names) - known):
        raise UsageError(
            f"--lora-targets {','.join(unknown)}: the model has no such linear layer; it has "
            f"{', '.join(sorted(known))}"
        )
    return list(names)


def set_device(name: str) -> str:
    """Choose the device to trace graphs for: "cpu", "gpu", or "auto" for MLX's default.

    Returns which of "cpu" and "gpu" it is.
    """
    if name == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError(
            "--device gpu: MLX finds no GPU here, and graphs are traced on the device that runs "
            "them; use --device cpu, or export where there is a GPU"
        )
    if name != "auto":
        mx.set_default_device(mx.gpu if name == "gpu" else mx.cpu)
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def _settings(config: ExportConfig) -> dict[str, Any]:
    """The settings that are not at their default, as the manifest records them."""
    values = {one.name: (getattr(config, one.name), one.default) for one in fields(config)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in values.items()
        if value != default
    }


class _Tensors:
    """Writes a checkpoint's tensors to a bundle, block after block, and remembers where."""

    def __init__(
        self,
        config: ExportConfig,
        checkpoint: Checkpoint,
        writer: BundleWriter,
        progress: Progress,
    ) -> None:
        self.config, self.checkpoint, self.writer = config, checkpoint, writer
        self.progress = progress
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Extent] = {}
        self.done = 0
        self.total = sum(math.prod(checkpoint.shape(n)) for n in checkpoint.names())

    def check_space(self, cut: Cut) -> None:
        """Raise StorageError if the disk has too little space, before anything is written."""
        floating = self.config.bits in FLOAT_BITS.values()
        bits = self.config.bits + (0 if floating else 16 / self.config.group_size)
        needed = int(self.total * bits / 8)
        free = shutil.disk_usage(self.writer.folder).free
        if needed > free:
            raise StorageError(
                f"the bundle needs about {needed / 1e6:.0f} MB, but only {free / 1e6:.0f} MB are "
                f"free at {self.writer.destination.parent}; make room or choose another --output"
            )

    def write(self, cut: Cut) -> None:
        for block in cut.blocks:
            self.writer.align_block()
            block_type = cut.block_types[block.type]
            for name, shape in block_type.parameters.items():
                self._vector(block.tensor(name), shape)
            for operation in block_type.operations:
                linear = operation.adaptable
                bits = self.config.bits if linear else self.config.least_embedding_bits
                vectors = operation.vectors(block.tensor)
                for name in operation.matrices(block.tensor):
                    self._matrix(name, bits)
                    if (bias := f"{name}.bias") in vectors:
                        self._vector(bias, self.matrices[name].packed.shape[:1])
        self.writer.align_block()

    def _vector(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self.vectors:
            return
        value = self.checkpoint.rows(name, 0, shape[0])
        self._check(name, value, 0)
        self.vectors[name] = self.writer.tensor([value.tobytes()], "float32", shape)
        self._advance(name, value.size)

    def _matrix(self, name: str, bits: int) -> None:
        if name in self.matrices:
            return
        tensor = f"{name}.weight"
        rows, columns = self.checkpoint.shape(tensor)
        ready = self.checkpoint.prequantized(tensor)
        if ready is not None:
            self.matrices[name] = self._copied(name, rows, columns, ready.bits, ready.group_size)
            return
        if bits in FLOAT_BITS.values():
            self.matrices[name] = self._floats(name, rows, columns, bits)
            return
        group = self.config.group_size
        if columns % group:
            fitting = [str(size) for size in (32, 64, 128) if columns % size == 0]
            raise UsageError(
                f"{name} has {columns} columns, which --group-size {group} does not divide; "
                f"use {' or '.join(fitting) or 'another model'}"
            )
        scales: list[npt.NDArray[np.float16]] = []
        squares = errors = peak = 0.0

        def packed() -> Iterator[bytes]:
            nonlocal squares, errors, peak
            for start, stop in self._slices(rows, columns):
                value = self.checkpoint.rows(tensor, start, stop)
                self._check(tensor, value, start)
                result = quantize_rows(value, bits, group)
                if not np.isfinite(result.scales).all():
                    raise BundleError(
                        f"{tensor} holds values too large for float16 scales, up to "
                        f"{np.abs(value).max():.3g}: the checkpoint is damaged, download or "
                        "convert it again"
                    )
                scales.append(result.scales)
                squares += result.square_sum
                errors += result.error_sum
                peak = max(peak, result.error_max)
                yield result.packed.tobytes()
                self._advance(name, value.size)

        words = self.writer.tensor(packed(), "uint32", (rows, columns * bits // 32))
        steps = self.writer.tensor(
            (part.tobytes() for part in scales), "float16", (rows, columns // group)
        )
        error = {
            "relative_rms": math.sqrt(errors / squares) if squares else 0.0,
            "rms": math.sqrt(errors / (rows * columns)),
            "max": peak,
        }
        self.matrices[name] = Matrix(
            rows, columns, bits, group, "symmetric", words, steps, None, error
        )

    def _floats(self, name: str, rows: int, columns: int, bits: int) -> Matrix:
        """Write a matrix in floating point."""
        tensor = f"{name}.weight"
        dtype = "float32" if bits == 32 else self._short_type(tensor, rows, columns)
        squares = errors = peak = 0.0

        def values() -> Iterator[bytes]:
            nonlocal squares, errors, peak
            for start, stop in self._slices(rows, columns):
                value = self.checkpoint.rows(tensor, start, stop)
                self._check(tensor, value, start)
                stored = rounded(value, dtype)
                error = value - stored.astype(np.float32)
                if not np.isfinite(error).all():
                    raise BundleError(
                        f"{tensor} holds values too large for {dtype}, up to "
                        f"{np.abs(value).max():.3g}; use --bits 32"
                    )
                squares += float(np.square(value, dtype=np.float64).sum())
                errors += float(np.square(error, dtype=np.float64).sum())
                peak = max(peak, float(np.abs(error).max()))
                yield stored.tobytes()
                self._advance(name, value.size)

        extent = self.writer.tensor(values(), dtype, (rows, columns))
        error = {
            "relative_rms": math.sqrt(errors / squares) if squares else 0.0,
            "rms": math.sqrt(errors / (rows * columns)),
            "max": peak,
        }
        return Matrix(rows, columns, bits, 0, "float", extent, error=error if errors else {})

    def _short_type(self, tensor: str, rows: int, columns: int) -> str:
        """bfloat16, unless float16 holds all values exactly and bfloat16 does not."""
        exact = dict.fromkeys(("float16", "bfloat16"), True)
        for start, stop in self._slices(rows, columns):
            value = self.checkpoint.rows(tensor, start, stop)
            for dtype in exact:
                exact[dtype] &= bool((rounded(value, dtype).astype(np.float32) == value).all())
            if not any(exact.values()):
                break
        return "float16" if exact["float16"] and not exact["bfloat16"] else "bfloat16"

    def _copied(self, name: str, rows: int, columns: int, bits: int, group: int) -> Matrix:
        """Write a matrix that MLX has quantized already, unchanged but for float32 scales."""
        tensor = f"{name}.weight"
        scales: list[bytes] = []
        biases: list[bytes] = []

        def packed() -> Iterator[bytes]:
            for start, stop in self._slices(rows, columns):
                words, scale, bias = self.checkpoint.packed_rows(tensor, start, stop)
                self._check(tensor, scale, start)
                self._check(tensor, bias, start)
                scales.append(scale.astype(np.float32).tobytes())
                biases.append(bias.astype(np.float32).tobytes())
                yield words.tobytes()
                self._advance(name, (stop - start) * columns)

        words = self.writer.tensor(packed(), "uint32", (rows, columns * bits // 32))
        groups = (rows, columns // group)
        return Matrix(
            rows,
            columns,
            bits,
            group,
            "affine",
            words,
            self.writer.tensor(scales, "float32", groups),
            self.writer.tensor(biases, "float32", groups),
        )

    def _slices(self, rows: int, columns: int) -> Iterator[tuple[int, int]]:
        step = max(1, SLICE_VALUES // columns)
        for start in range(0, rows, step):
            yield start, min(rows, start + step)

    def _check(self, name: str, value: npt.NDArray[Any], row: int) -> None:
        finite = np.isfinite(value)
        if not finite.all():
            at = np.argwhere(~finite)[0].tolist()
            at[0] += row
            raise BundleError(
                f"{name} holds {value[~finite][0]} at {at} ({(~finite).sum()} such values in this "
                "slice): the checkpoint is damaged, download or convert it again"
            )

    def _advance(self, name: str, values: int) -> None:
        self.done += values
        self.progress(name, self.done, self.total)


def rounded(value: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """The values in a stored type; those that are too large become infinite."""
    with np.errstate(over="ignore"):
        return value.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, copy=False)


def write_graphs(
    cut: Cut, buckets: tuple[int, ...], folder: Path, subfolder: str, progress: Progress
) -> dict[str, Graph]:
    """Serialize every elementwise graph, for every bucket, into `folder / subfolder`."""
    graphs: dict[str, Graph] = {}
    for index, graph in enumerate(cut.graphs):
        for length in sorted({graph.operation.graph_tokens(bucket) for bucket in buckets}):
            for direction in ("forward", "vjp"):
                key = graph_key(graph.operation.graph, direction, length)
                graphs[key] = _write_graph(graph, direction, length, folder, f"{subfolder}/{key}")
        progress("graphs", index + 1, len(cut.graphs))
    return graphs


def _write_graph(
    graph: ElementwiseGraph, direction: str, length: int, folder: Path, stem: str
) -> Graph:
    forward = direction == "forward"
    function = graph.forward if forward else graph.vjp
    shapes = graph.forward_shapes if forward else graph.vjp_shapes
    inputs = [mx.zeros(shape_at(shape, length)) for shape in shapes]
    traced = trace(function, inputs, differentiated=not forward)
    name = f"{stem}.mlxfn"
    path = folder / name
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:  # the function has been traced: what fails now is the file, whole only if it loads
            serialize(path, function, inputs, differentiated=not forward)
            mx.import_function(str(path))
        except RuntimeError as problem:
            raise OSError(errno.ENOSPC, str(problem)) from None
        fsync_path(path)
    return Graph(
        name,
        path.stat().st_size,
        sha256_file(path),
        tuple(tuple(a.shape) for a in inputs),
        traced.output_shapes,
        traced.workspace_bytes,
    )
