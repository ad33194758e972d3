"""The checks of a manifest before any byte that it refers to is used."""

from __future__ import annotations

import json
import math
import re

import msgspec

from runtime.adapters.lora import LoraSettings
from runtime.arrays.stored import ALIGNMENT, FLOAT_BITS, ITEM_BYTES, Block, Extent, Matrix
from runtime.bundle.manifest import Manifest
from runtime.core.errors import BundleError
from runtime.core.stripes import MAX_SLICES
from runtime.operations.base import Operation, Scope, require
from runtime.operations.program import BlockType
from runtime.operations.values import T, is_parameter

VERSION_NUMBER = re.compile(r"[0-9A-Za-z.+!_-]{0,60}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
PLACES = {"graph": re.compile(r"graphs[A-Za-z0-9_.-]*/[^/]+"), "file": re.compile(r"tokenizer/.+")}
ERROR = {"relative_rms", "rms", "max"}
MAX_NAME, MAX_DIM, MAX_DIMS, MAX_OPERATIONS = 200, 1 << 31, 8, 200
MAX_BYTES = 1 << 62
# so that a search over every combination of these takes little longer than reading the manifest
MAX_BUCKETS, MAX_BLOCKS, MAX_TYPES = 64, 1026, 128
SAFE = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,2}")


def check_manifest(manifest: Manifest) -> None:
    """Check that all references resolve, shapes agree and extents are disjoint and inside.

    Raises:
        BundleError: naming what is wrong.
    """
    _check_text(manifest)
    buckets = manifest.buckets
    require(bool(buckets) and buckets[0] > 0, "there is no sequence bucket")
    require(len(buckets) <= MAX_BUCKETS, f"{len(buckets)} buckets, at most {MAX_BUCKETS}")
    require(list(buckets) == sorted(set(buckets)), f"buckets {list(buckets)} are not ascending")
    require(buckets[-1] <= 1 << 20, f"bucket {buckets[-1]} is beyond reason")
    require(manifest.device in ("cpu", "gpu"), f"device {manifest.device!r}")
    plain = VERSION_NUMBER.fullmatch(manifest.mlx_version)
    require(plain is not None, f"mlx_version {manifest.mlx_version!r:.60}")
    for name, size in (("hidden_size", manifest.hidden_size), ("vocab_size", manifest.vocab_size)):
        require(0 < size <= MAX_DIM, f"{name} is {size}")
    require(0 <= manifest.weights_nbytes <= MAX_BYTES, f"weights_nbytes: {manifest.weights_nbytes}")
    if (part := manifest.slice) is not None:
        require(1 <= part.number <= part.of and 2 <= part.of <= MAX_SLICES, f"it is {part}")
    _check_files(manifest)
    _check_lora(manifest)
    if manifest.quality is not None:
        quality = manifest.quality
        counted = quality.tokens > 0 and quality.rows > 0 and quality.divergence >= -0.01
        require(counted, f"quality {quality!r:.200}")
    for name, matrix in manifest.matrices.items():
        _check_matrix(name, matrix)
    for name, extent in manifest.vectors.items():
        _check_extent(name, extent)
        require(extent.dtype == "float32", f"{name}: vectors are float32, not {extent.dtype}")
        require(1 <= len(extent.shape) <= 3, f"{name}: a vector of shape {extent.shape}")
    _check_layout(manifest)
    count, types = len(manifest.blocks), len(manifest.block_types)
    require(count <= MAX_BLOCKS, f"{count} blocks, at most {MAX_BLOCKS}")
    require(types <= MAX_TYPES, f"{types} block types, at most {MAX_TYPES}")
    used = {block.type for block in manifest.blocks}
    for name, block_type in manifest.block_types.items():
        require(block_type.name == name, f"block type {name} calls itself {block_type.name}")
        require(name in used, f"block type {name} has no block")
        _check_block_type(manifest, block_type)
    require(len(manifest.blocks) >= 3, "fewer than three blocks")
    layers = [block.name for block in manifest.layers]
    require(len(set(layers)) == len(layers), "two layers have the same name")
    for position, block in enumerate(manifest.blocks):
        _check_block(manifest, position, block)


def _check_text(manifest: Manifest) -> None:
    try:
        document = msgspec.to_builtins(manifest)
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # Python reads some documents that are not valid JSON
        raise BundleError(
            "manifest: a number that is not finite, or a text that is not valid Unicode"
        ) from None


def _check_files(manifest: Manifest) -> None:
    names = [("file", name, file.nbytes) for name, file in manifest.files.items()]
    names += [("graph", graph.file, graph.nbytes) for graph in manifest.graphs.values()]
    for kind, name, nbytes in names:
        allowed = len(name) <= MAX_NAME and SAFE.fullmatch(name) and PLACES[kind].fullmatch(name)
        require(bool(allowed), f"{kind} {name!r:.80} is not an allowed name")
        require(0 <= nbytes <= MAX_BYTES, f"{name} has {nbytes} bytes")
    for key, graph in manifest.graphs.items():
        require(0 <= graph.workspace_bytes <= MAX_BYTES, f"{key}: {graph.workspace_bytes} bytes")
        known = graph.allocated_bytes
        require(known is None or 0 <= known <= MAX_BYTES, f"{key}: {known} bytes")
        counts = [*map(math.prod, graph.inputs)]
        pairs = zip(graph.views, map(math.prod, graph.outputs), strict=False)
        as_large = (at == -1 or counts[at : at + 1] == [count] for at, count in pairs)
        good = len(graph.views) in (0, len(graph.outputs)) and all(as_large)
        require(good and min(graph.views, default=0) >= -1, f"{key}: views {graph.views}")
        for shape in (*graph.inputs, *graph.outputs):
            require(all(0 <= size <= MAX_DIM for size in shape), f"{key}: shape {shape}")


def _check_lora(manifest: Manifest) -> None:
    lora = manifest.lora
    require(not lora.problem, f"lora: {lora.problem}")
    plain = LoraSettings(lora.rank, lora.alpha, lora.targets)
    require(lora == plain, "lora has more than rank, alpha and targets")


def _check_extent(name: str, extent: Extent) -> None:
    require(extent.dtype in ITEM_BYTES, f"{name}: unknown dtype {extent.dtype!r}")
    require(len(extent.shape) <= MAX_DIMS, f"{name}: {len(extent.shape)} dimensions")
    require(all(0 <= size <= MAX_DIM for size in extent.shape), f"{name}: shape {extent.shape}")
    expected = math.prod(extent.shape) * ITEM_BYTES[extent.dtype]
    require(extent.nbytes == expected, f"{name}: {extent.nbytes} bytes, its shape needs {expected}")
    aligned = 0 <= extent.offset <= MAX_BYTES and extent.offset % ALIGNMENT == 0
    require(aligned, f"{name}: offset {extent.offset} is not aligned")


def _check_matrix(name: str, m: Matrix) -> None:
    good = 0 < m.columns <= MAX_DIM and 0 < m.rows <= MAX_DIM
    require(good, f"{name}: no rows or columns, or too many")
    good = all(math.isfinite(value) and value >= 0 for value in m.error.values())
    require(set(m.error) in (set(), ERROR) and good, f"{name}: quantization error {m.error!r:.80}")
    _check_extent(name, m.packed)
    if m.is_float:
        _check_float(name, m)
    else:
        _check_quantized(name, m)


def _check_float(name: str, m: Matrix) -> None:
    bits = FLOAT_BITS.get(m.packed.dtype)
    require(bits is not None, f"{name}: layout float of dtype {m.packed.dtype}")
    require(m.bits == bits, f"{name}: {m.bits} bits of dtype {m.packed.dtype}")
    require(m.group_size == 0, f"{name}: group size {m.group_size} and layout float")
    values = (m.rows, m.columns)
    require(m.packed.shape == values, f"{name}: shape {m.packed.shape}, expected {values}")
    require(m.scales is None and m.biases is None, f"{name}: scales or biases and layout float")


def _check_quantized(name: str, m: Matrix) -> None:
    require(m.bits in (4, 8), f"{name}: {m.bits} bits")
    require(m.group_size in (32, 64, 128), f"{name}: group size {m.group_size}")
    require(m.columns % m.group_size == 0, f"{name}: {m.columns} columns, groups of {m.group_size}")
    packed = (m.rows, m.columns * m.bits // 32)
    require(m.packed.shape == packed, f"{name}: packed shape {m.packed.shape}, expected {packed}")
    require(m.packed.dtype == "uint32", f"{name}: packed as {m.packed.dtype}")
    require(m.scales is not None, f"{name}: no scales")
    require((m.biases is not None) == (m.layout == "affine"), f"{name}: biases and {m.layout}")
    for part in m.extents[1:]:
        _check_extent(name, part)
        groups = (m.rows, m.columns // m.group_size)
        require(part.shape == groups, f"{name}: scales {part.shape}, expected {groups}")
        require(part.dtype != "uint32", f"{name}: scales of dtype {part.dtype}")


def _check_layout(manifest: Manifest) -> None:
    extents = [(e, name) for name, e in manifest.vectors.items()]
    extents += [(part, name) for name, m in manifest.matrices.items() for part in m.extents]
    end, before = 0, ""
    for extent, name in sorted(extents, key=lambda item: item[0].offset):
        require(extent.offset >= end, f"{name} overlaps {before}")
        end, before = extent.offset + extent.nbytes, name
    require(end <= manifest.weights_nbytes, f"{before} ends at {end}, beyond weights.bin")


def _check_block_type(manifest: Manifest, block_type: BlockType) -> None:
    """Check that every value is computed once, before it is used, and that it is used."""
    values, where = block_type.values, f"block type {block_type.name}"
    known = {block_type.input} if block_type.input else set()
    operations = block_type.operations
    require(len(operations) <= MAX_OPERATIONS, f"{where}: {len(operations)} operations")
    require(known <= set(values), f"{where}: its input {block_type.input} has no shape")
    for name, shape in values.items():
        require(NAME.fullmatch(name) is not None, f"{where}: value {name!r}")
        sizes = [dim for dim in shape if isinstance(dim, int)]
        good = shape.count(T) == 1 and len(sizes) == len(shape) - 1 and len(shape) <= MAX_DIMS
        require(good and all(0 < d <= MAX_DIM for d in sizes), f"{where}: {name} is {shape}")
    for name, sizes_of in block_type.parameters.items():
        require(all(0 < d <= MAX_DIM for d in sizes_of), f"{where}: {name} is {sizes_of}")
    scope = Scope(where, values, block_type.parameters, manifest.tables)
    for position, operation in enumerate(operations):
        first, last = position == 0, position == len(operations) - 1
        require(first or bool(operation.inputs_read), f"{where}: a late {operation.label}")
        require(last or operation.in_schedule, f"{where}: an early {operation.label}")
        for name in operation.inputs_read:
            if is_parameter(name):
                taken = operation.takes_parameters and name[1:] in block_type.parameters
                require(taken, f"{where}: {operation.label} of the parameter {name}")
            else:
                require(name in known, f"{where}: {name} is used before it is made")
        made = operation.results
        for name in made:
            require(name in values, f"{where}: {name} has no shape")
            require(name not in known, f"{where}: {name} is made twice")
        require(len(set(made)) == len(made), f"{where}: {made} are not distinct")
        for name in operation.statistics:
            require(name not in values, f"{where}: value {name!r}")
        known |= set(made)
        operation.check(scope)
    require(block_type.output in known, f"{where}: its output {block_type.output} is never made")
    used = {
        block_type.output,
        *(name for operation in operations for name in operation.inputs_read),
    }
    require(known <= used, f"{where}: {sorted(known - used)} are never used")


def _check_block(manifest: Manifest, position: int, block: Block) -> None:
    """Check that the embedding comes first, the head last, and that every tensor exists."""
    where = f"block {position} ({block.label})"
    block_type = manifest.block_types.get(block.type)
    if block_type is None:
        raise BundleError(f"manifest: {where}: no block type {block.type!r}")
    operations, values = block_type.operations, block_type.values
    first, last = position == 0, position == len(manifest.blocks) - 1
    begins = [not operation.inputs_read for operation in operations]
    ends = [not operation.in_schedule for operation in operations]
    labels = [operation.label for operation in operations]
    require(any(begins) == first, f"{where}: {labels}")
    require(any(ends) == last, f"{where}: {labels}")
    stream = values[block_type.output]
    require(len(stream) == 3 and stream[:2] == (1, T), f"{where}: it returns {stream}")
    if position:
        before = manifest.block_types[manifest.blocks[position - 1].type]
        taken, given = values.get(block_type.input), before.values[before.output]
        require(taken == given, f"{where}: it takes {taken}, and is given {given}")
    require(bool(block_type.input) != first, f"{where}: input {block_type.input!r}")
    for name, shape in block_type.parameters.items():
        vector = manifest.vectors.get(block.tensor(name))
        require(vector is not None and vector.shape == shape, f"{where}: {name} is not {shape}")
    scope = Scope(where, values, block_type.parameters, manifest.tables, block.tensor)
    for operation in operations:
        if not operation.in_schedule:
            (name,) = operation.activations
            require(name == block_type.output, f"{where}: the head reads {name}")
        operation.check_weights(scope)
        if operation.cache_of:
            _check_owner(manifest, position, operation, where)


def _check_owner(manifest: Manifest, position: int, operation: Operation, where: str) -> None:
    """Check that an earlier layer has keys and values of its own under the same names."""
    values = manifest.block_types[manifest.blocks[position].type].values
    owner = next((b for b in manifest.blocks[1:position] if b.name == operation.cache_of), None)
    kept: dict[str, tuple[int, ...]] = {}
    if owner is not None:
        of = manifest.block_types[owner.type]
        for other in of.operations:
            kept |= {} if other.cache_of else other.decoding(MAX_DIM).cached(of.values)
    own = msgspec.structs.replace(operation, cache_of="")
    shared = own.decoding(MAX_DIM).cached(values)
    require(shared.items() <= kept.items(), f"{where}: {operation.cache_of!r} has no such keys")
