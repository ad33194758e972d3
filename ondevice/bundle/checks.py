"""What must hold of a manifest before any byte it points to is used."""

from __future__ import annotations

import json
import math
import re

from ondevice.bundle.manifest import (
    ALIGNMENT,
    ITEM_BYTES,
    Block,
    BlockType,
    Extent,
    Manifest,
    Matrix,
    Step,
    T,
    graph_key,
    graph_length,
    may_be_gated,
    shape_at,
)
from ondevice.bundle.schema import encode
from ondevice.errors import BundleError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
PLACES = {"graph": re.compile(r"graphs[A-Za-z0-9_.-]*/[^/]+"), "file": re.compile(r"tokenizer/.+")}
ERROR = {"relative_rms", "rms", "max"}
MAX_NAME, MAX_DIM, MAX_DIMS, MAX_STEPS = 200, 1 << 31, 8, 200
SAFE = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*){0,2}")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise BundleError(f"manifest: {message}")


def check_manifest(manifest: Manifest) -> None:
    """Check that all references resolve, shapes agree and extents are disjoint and inside.

    Raises:
        BundleError: naming what is wrong.
    """
    _check_text(manifest)
    buckets = manifest.buckets
    require(bool(buckets) and buckets[0] > 0, "there is no bucket")
    require(list(buckets) == sorted(set(buckets)), f"buckets {list(buckets)} are not ascending")
    require(buckets[-1] <= 1 << 20, f"bucket {buckets[-1]} is beyond reason")
    require(manifest.device in ("cpu", "gpu"), f"device {manifest.device!r}")
    names = [("file", name) for name in manifest.files]
    names += [("graph", graph.file) for graph in manifest.graphs.values()]
    for what, name in names:
        allowed = len(name) <= MAX_NAME and SAFE.fullmatch(name) and PLACES[what].fullmatch(name)
        require(bool(allowed), f"{what} {name!r:.80} is not an allowed name")
    _check_lora(manifest)
    for name, matrix in manifest.matrices.items():
        _check_matrix(name, matrix)
    for name, extent in manifest.vectors.items():
        _check_extent(name, extent)
        require(extent.dtype == "float32", f"{name}: vectors are float32, not {extent.dtype}")
        require(len(extent.shape) == 1, f"{name}: a vector of shape {extent.shape}")
    _check_layout(manifest)
    used = {block.type for block in manifest.blocks}
    for name, block_type in manifest.block_types.items():
        require(block_type.name == name, f"block_type {name} calls itself {block_type.name}")
        require(name in used, f"block_type {name} has no block")
        _check_block_type(manifest, block_type)
    require(len(manifest.blocks) >= 3, "fewer than three blocks")
    layers = [block.name for block in manifest.layers]
    require(len(set(layers)) == len(layers), "two layers have the same name")
    for position, block in enumerate(manifest.blocks):
        _check_block(manifest, position, block)


def _check_text(manifest: Manifest) -> None:
    try:
        json.dumps(encode(manifest), ensure_ascii=False, allow_nan=False).encode()
    except ValueError:  # Python reads NaN, and half a surrogate pair, and can print neither as JSON
        raise BundleError(
            "manifest: a number that is not finite, or a text that is not valid Unicode"
        ) from None


def _check_lora(manifest: Manifest) -> None:
    lora = manifest.lora
    require(set(lora) == {"rank", "alpha", "targets"}, f"lora has keys {sorted(lora)}")
    rank, alpha = lora["rank"], lora["alpha"]
    require(type(rank) is int and 0 < rank <= 4096, "lora.rank is not in 1..4096")
    require(type(alpha) in (int, float) and 0 < alpha <= 1e6, "lora.alpha is not in 0..1e6")
    targets = lora["targets"]
    listed = isinstance(targets, list) and all(isinstance(t, str) for t in targets)
    require(targets == "all-linear" or listed, "lora.targets")


def _check_extent(name: str, extent: Extent) -> None:
    require(extent.dtype in ITEM_BYTES, f"{name}: unknown dtype {extent.dtype!r}")
    require(len(extent.shape) <= MAX_DIMS, f"{name}: {len(extent.shape)} dimensions")
    expected = math.prod(extent.shape) * ITEM_BYTES[extent.dtype]
    require(extent.nbytes == expected, f"{name}: {extent.nbytes} bytes, its shape needs {expected}")
    require(extent.offset % ALIGNMENT == 0, f"{name}: offset {extent.offset} is not aligned")


def _check_matrix(name: str, m: Matrix) -> None:
    require(m.bits in (4, 8), f"{name}: {m.bits} bits")
    require(m.group_size in (32, 64, 128), f"{name}: group size {m.group_size}")
    require(m.columns > 0 and m.rows > 0, f"{name}: empty")
    require(m.columns % m.group_size == 0, f"{name}: {m.columns} columns, groups of {m.group_size}")
    good = all(math.isfinite(value) and value >= 0 for value in m.error.values())
    require(set(m.error) in (set(), ERROR) and good, f"{name}: quantization error {m.error!r:.80}")
    _check_extent(name, m.packed)
    packed = (m.rows, m.columns * m.bits // 32)
    require(m.packed.shape == packed, f"{name}: packed shape {m.packed.shape}, expected {packed}")
    require(m.packed.dtype == "uint32", f"{name}: packed as {m.packed.dtype}")
    require((m.biases is not None) == (m.layout == "affine"), f"{name}: biases and {m.layout}")
    for part in (m.scales, m.biases):
        if part is not None:
            _check_extent(name, part)
            groups = (m.rows, m.columns // m.group_size)
            require(part.shape == groups, f"{name}: scales {part.shape}, expected {groups}")
            require(part.dtype != "uint32", f"{name}: scales of dtype {part.dtype}")


def _check_layout(manifest: Manifest) -> None:
    extents = [(e, name) for name, e in manifest.vectors.items()]
    for name, matrix in manifest.matrices.items():
        parts = (matrix.packed, matrix.scales, matrix.biases)
        extents += [(part, name) for part in parts if part is not None]
    end, before = 0, ""
    for extent, name in sorted(extents, key=lambda item: item[0].offset):
        require(extent.offset >= end, f"{name} overlaps {before}")
        end, before = extent.offset + extent.nbytes, name
    require(end <= manifest.weights_nbytes, f"{before} ends at {end}, beyond weights.bin")


def _check_block_type(manifest: Manifest, block_type: BlockType) -> None:
    known = {block_type.input} if block_type.input else set()
    where = f"block_type {block_type.name}"
    require(len(block_type.steps) <= MAX_STEPS, f"{where}: {len(block_type.steps)} steps")
    require(known <= set(block_type.values), f"{where}: its input {block_type.input} has no shape")
    for name, shape in block_type.values.items():
        good = NAME.fullmatch(name) is not None and not name.endswith(".lse")
        require(good, f"{where}: value {name!r}")
        sizes = [dim for dim in shape if isinstance(dim, int)]
        good = shape.count(T) == 1 and len(sizes) == len(shape) - 1 and len(shape) <= MAX_DIMS
        require(good and all(0 < d <= MAX_DIM for d in sizes), f"{where}: {name} is {shape}")
    for position, step in enumerate(block_type.steps):
        _check_fields(step, where)
        require(step.op != "embedding" or position == 0, f"{where}: a late embedding")
        require(
            step.op != "head" or position == len(block_type.steps) - 1, f"{where}: an early head"
        )
        for name in step.inputs:
            if name.startswith("@"):
                require(step.op == "elementwise", f"{where}: {step.op} of the parameter {name}")
                require(name[1:] in block_type.parameters, f"{where}: no parameter {name}")
            else:
                require(name in known, f"{where}: {name} is used before it is made")
        made = [*step.outputs, *(linear.output for linear in step.linears)]
        for name in made:
            require(name in block_type.values, f"{where}: {name} has no shape")
            require(name not in known, f"{where}: {name} is made twice")
        require(len(set(made)) == len(made), f"{where}: {made} are not distinct")
        known |= set(made)
        if step.op == "elementwise":
            _check_elementwise(manifest, block_type, step)
        elif step.op == "attention":
            _check_attention(block_type, step)
        elif step.op == "linear":
            shapes = [block_type.values[name] for name in (*step.inputs, *made)]
            require(all(s[:2] == (1, T) and len(s) == 3 for s in shapes), f"{where}: {shapes}")
    require(block_type.output in known, f"{where}: its output {block_type.output} is never made")
    used = {block_type.output, *(name for step in block_type.steps for name in step.inputs)}
    require(known <= used, f"{where}: {sorted(known - used)} are never used")


ARITY = {"embedding": (0, 1, 0), "attention": (3, 1, 0), "head": (1, 0, 0)}
FIELDS = {
    "embedding": {"matrix"},
    "linear": {"linears"},
    "attention": {"scale", "window"},
    "elementwise": {"graph", "vjp_inputs", "vjp_outputs", "vjp_same", "tokenwise", "gated"},
    "head": {"matrix"},
}


def _check_fields(step: Step, where: str) -> None:
    """A step has the inputs and outputs of its operation, and no other operation's fields."""
    require(step.op in FIELDS and not step.steps, f"{where}: {step.op} step")
    counts = (len(step.inputs), len(step.outputs), len(step.linears))
    if step.op == "linear":
        require(counts[:2] == (1, 0) and bool(step.linears), f"{where}: linear step")
    elif step.op == "elementwise":
        distinct = len(set(step.inputs)) == len(step.inputs)
        require(distinct and bool(step.outputs), f"{where}: glue {step.graph}")
    else:
        require(counts == ARITY[step.op], f"{where}: {step.op} step")
    blank = Step(step.op)
    for name in set().union(*FIELDS.values()):
        foreign = name not in FIELDS[step.op] and getattr(step, name) != getattr(blank, name)
        require(not foreign, f"{where}: {step.op} step with {name}")


def _check_attention(block_type: BlockType, step: Step) -> None:
    where = f"block_type {block_type.name}: attention"
    require(len(set(step.inputs)) == len(step.inputs), f"{where} of {step.inputs}")
    q, k, v = (block_type.values[name] for name in step.inputs)
    out = block_type.values[step.outputs[0]]
    require(all(len(s) == 4 and s[0] == 1 and s[2] == T for s in (q, k, v, out)), f"{where} shapes")
    require(k[1] == v[1] and q[3] == k[3] and out == (1, q[1], T, v[3]), f"{where} shapes")
    require(int(k[1]) > 0 and int(q[1]) % int(k[1]) == 0, f"{where}: {q[1]} heads on {k[1]}")
    require(step.scale > 0 and math.isfinite(step.scale), f"{where}: scale {step.scale}")
    require(step.window is None or step.window > 0, f"{where}: window {step.window}")


def _check_elementwise(manifest: Manifest, block_type: BlockType, step: Step) -> None:
    where = f"block_type {block_type.name}: glue {step.graph}"
    for name in step.vjp_inputs:
        bare = name.removeprefix("~")
        expected = step.outputs if name.startswith("~") else step.inputs
        require(bare in expected, f"{where}: its vjp wants {name}")
    activations = {name for name in step.inputs if not name.startswith("@")}
    returned = (len(step.vjp_outputs), set(step.vjp_outputs))
    require(returned == (len(activations), activations), f"{where}: its vjp: {step.vjp_outputs}")
    _check_same(block_type, step, where)
    if step.tokenwise:
        for name in (*activations, *step.outputs):
            require(
                block_type.values[name].count(T) == 1, f"{where}: {name} has not one axis of tokens"
            )
    # whether the graph computes it is not known here, as of all that graphs compute
    good = not step.gated or may_be_gated(step, block_type.values)
    require(good, f"{where}: {step.gated} of {step.inputs}, {step.vjp_inputs}")
    for bucket in manifest.buckets:
        length = graph_length(step, bucket)
        for direction, inputs, outputs in (
            ("forward", step.inputs, step.outputs),
            ("vjp", step.vjp_inputs, step.vjp_outputs),
        ):
            graph = manifest.graphs.get(graph_key(step.graph, direction, length))
            if graph is None:
                raise BundleError(f"manifest: {where}: no {direction} graph for bucket {bucket}")
            for names, shapes in ((inputs, graph.inputs), (outputs, graph.outputs)):
                expected_shapes = tuple(_shape(block_type, name, length) for name in names)
                require(shapes == expected_shapes, f"{where}: signature {shapes}")


def _check_same(block_type: BlockType, step: Step, where: str) -> None:
    """A gradient is a cotangent that the vjp takes, an earlier gradient, or an array of its own.

    Whether the graph does as it says is not known here, as of all that graphs compute.
    """
    as_many = len(step.vjp_same) == len(step.vjp_outputs)
    require(as_many, f"{where}: its vjp's gradients: {step.vjp_same}")
    own: set[str] = set()
    for name, same in zip(step.vjp_outputs, step.vjp_same, strict=True):
        if not same:
            own.add(name)
            continue
        known = same in (step.vjp_inputs if same.startswith("~") else own)
        alike = known and block_type.values[same.removeprefix("~")] == block_type.values[name]
        require(alike, f"{where}: its gradient of {name} is said to be {same}")


def _shape(block_type: BlockType, name: str, bucket: int) -> tuple[int, ...]:
    if name.startswith("@"):
        return block_type.parameters[name[1:]]
    return shape_at(block_type.values[name.removeprefix("~")], bucket)


def _check_block(manifest: Manifest, position: int, block: Block) -> None:
    where = f"block {position} ({block.name or block.type})"
    block_type = manifest.block_types.get(block.type)
    if block_type is None:
        raise BundleError(f"manifest: {where}: no block_type {block.type!r}")
    ops = [step.op for step in block_type.steps]
    first, last = position == 0, position == len(manifest.blocks) - 1
    require(("embedding" in ops) == first and ops.count("embedding") <= 1, f"{where}: {ops}")
    require(("head" in ops) == last and ops.count("head") <= 1, f"{where}: {ops}")
    stream = (1, T, manifest.hidden_size)
    for end in (block_type.input, block_type.output):
        require(
            not end or block_type.values.get(end) == stream, f"{where}: {end!r} is not {stream}"
        )
    require(bool(block_type.input) != first, f"{where}: input {block_type.input!r}")
    for name, shape in block_type.parameters.items():
        vector = manifest.vectors.get(block.tensor(name))
        require(vector is not None and vector.shape == shape, f"{where}: {name} is not {shape}")
    for step in block_type.steps:
        if step.op in ("embedding", "head"):
            matrix = manifest.matrices.get(step.matrix)
            expected = (manifest.vocab_size, manifest.hidden_size)
            found = matrix and (matrix.rows, matrix.columns)
            require(found == expected, f"{where}: {step.matrix} is {found}, expected {expected}")
            (name,) = step.inputs or step.outputs
            require(block_type.values[name] == stream, f"{where}: {name} is not {stream}")
            require(first or name == block_type.output, f"{where}: the head reads {name}")
        for linear in step.linears:
            name = block.tensor(linear.name)
            matrix = manifest.matrices.get(name)
            wanted = (block_type.values[linear.output][-1], block_type.values[step.inputs[0]][-1])
            found = matrix and (matrix.rows, matrix.columns)
            require(found == wanted, f"{where}: {name} is {found}, expected {wanted}")
            bias = manifest.vectors.get(f"{name}.bias")
            if linear.bias:
                require(bias is not None and bias.shape == wanted[:1], f"{where}: {name}.bias")
