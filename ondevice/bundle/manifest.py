"""The bundle's manifest: which blocks there are, their programs, and where every byte lies.

Plain data and its validation; it knows neither MLX nor the file system. A `Manifest` that was
built by `Manifest.from_json` has been checked: every reference resolves, every extent lies inside
the weights file and overlaps no other, every program is well formed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = "ondevice-bundle"
VERSION = 4
ALIGNMENT = 64
PAGE = 16384  # macOS arm64 pages; a multiple of Linux's

Activation = Literal["", "silu", "gelu_tanh"]  # MLX's silu and gelu_approx

T = "T"  # the symbolic dimension: the bucket
MOST_TILE_TOKENS, LEAST_TILE_TOKENS = 64, 16  # of token-wise glue
Dim = int | str
Shape = tuple[Dim, ...]
ITEM_BYTES = {"uint32": 4, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes of weights.bin from `offset`, holding `dtype` values of `shape`."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A frozen matrix (rows, columns) in MLX's packed layout.

    Row r holds `columns` unsigned integers of `bits` bits, lowest bits first in uint32 words;
    value = scale * q + bias per group of `group_size` columns. `symmetric` stores no biases:
    bias = -2**(bits-1) * scale. `error` is what quantizing did to the values: `relative_rms`, `rms`
    and `max`, or nothing where the checkpoint was quantized already.
    """

    rows: int
    columns: int
    bits: int
    group_size: int
    layout: Literal["symmetric", "affine"]
    packed: Extent
    scales: Extent
    biases: Extent | None = None
    error: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        extents = (self.packed, self.scales, self.biases)
        return sum(extent.nbytes for extent in extents if extent is not None)


@dataclass(frozen=True)
class Linear:
    """One product of a linear step: `name` is relative to the block."""

    name: str
    output: str
    bias: bool


@dataclass(frozen=True)
class Step:
    """One step of a program; which fields are used depends on `op`.

    - embedding: `matrix`, outputs = (rows looked up,)
    - linear: inputs = (x,), `linears`
    - attention: inputs = (q, k, v), outputs = (a,), `scale`, `window`
    - glue: `graph`, inputs (values and parameters `@name`), outputs; `vjp_inputs` are what its
      vjp needs (cotangents are `~name`), `vjp_outputs` the values it returns gradients for,
      `vjp_same` for each of these the cotangent whose array it is, or the earlier value whose
      gradient it is, or "";
      `tokenwise` where every token is treated alike, so that graphs of a tile of tokens do;
      `gated` names f where the graph is f(first input) * second, which a kernel may compute instead
    - head: inputs = (h,), `matrix`
    - tiled: inputs = (x,), outputs = (y,), and the `steps` from one to the other, which treat every
      token alike; made while a bundle is run (`runtime.lowering.token_tiles`), never stored in one
    """

    op: Literal["embedding", "linear", "attention", "elementwise", "head", "tiled"]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    matrix: str = ""
    linears: tuple[Linear, ...] = ()
    scale: float = 0.0
    window: int | None = None
    graph: str = ""
    vjp_inputs: tuple[str, ...] = ()
    vjp_outputs: tuple[str, ...] = ()
    vjp_same: tuple[str, ...] = ()
    tokenwise: bool = False
    gated: Activation = ""
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class BlockType:
    """A program: operations over named values.

    `parameters` are the shapes of the small tensors (norm weights) that elementwise graphs take.
    """

    name: str
    input: str
    output: str
    values: dict[str, Shape]
    parameters: dict[str, tuple[int, ...]]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Block:
    """One block: its tensors are named `name.relative`, or `relative` where it has no name."""

    name: str
    type: str  # which of the manifest's block types it is

    def tensor(self, relative: str) -> str:
        return f"{self.name}.{relative}" if self.name else relative


@dataclass(frozen=True)
class Graph:
    """One serialized function: its file, checksum, signature and the bytes it needs inside."""

    file: str
    nbytes: int
    sha256: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    workspace_bytes: int


@dataclass(frozen=True)
class File:
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of manifest.json. `graphs` is keyed `GRAPH.forward.TOKENS` and `GRAPH.vjp.TOKENS`."""

    mlx_version: str
    device: str
    family: str
    config: dict[str, Any]
    hidden_size: int
    vocab_size: int
    lora: dict[str, Any]
    buckets: tuple[int, ...]
    weights_nbytes: int
    weights_sha256: str
    matrices: dict[str, Matrix]
    vectors: dict[str, Extent]
    block_types: dict[str, BlockType]
    blocks: tuple[Block, ...]
    graphs: dict[str, Graph]
    files: dict[str, File]
    provenance: dict[str, Any]

    @property
    def layers(self) -> tuple[Block, ...]:
        """The blocks between the embedding and the head."""
        return self.blocks[1:-1]

    def adapted(self, block: Block) -> tuple[str, ...]:
        """Relative names of the block's linear layers that LoRA adapts, in program order."""
        targets = self.lora["targets"]
        names = [
            linear.name
            for step in self.block_types[block.type].steps
            if step.op == "linear"
            for linear in step.linears
        ]
        return tuple(n for n in names if targets == "all-linear" or n.split(".")[-1] in targets)


def may_be_gated(step: Step, values: dict[str, Shape]) -> bool:
    """Whether a glue step makes one value of two of its shape, and its vjp two of all three."""
    names = (*step.inputs, *step.outputs)
    if (len(step.inputs), len(step.outputs)) != (2, 1) or not set(names) <= set(values):
        return False
    alike = len({values[name] for name in names}) == 1
    takes = step.vjp_inputs == (*step.inputs, f"~{step.outputs[0]}")
    returns = step.vjp_outputs == step.inputs and not any(step.vjp_same)
    return alike and takes and returns and step.tokenwise


def graph_key(graph: str, direction: str, bucket: int) -> str:
    return f"{graph}.{direction}.{bucket}"


def graph_length(step: Step, bucket: int) -> int:
    """For how many tokens a glue step's graphs are made that serve a bucket.

    Token-wise graphs serve any multiple of theirs: the largest divisor of the bucket that is at most
    `MOST_TILE_TOKENS`, or the bucket itself where there is none of a useful size.
    """
    if not step.tokenwise:
        return bucket
    tile = max(length for length in range(1, MOST_TILE_TOKENS + 1) if bucket % length == 0)
    return tile if tile >= LEAST_TILE_TOKENS else bucket


def token_axis(shape: Shape) -> int:
    """Which axis of a value is that of the tokens."""
    return shape.index(T)


def shape_at(shape: Shape, bucket: int) -> tuple[int, ...]:
    """The shape with its symbolic dimension filled in."""
    return tuple(bucket if dim == T else int(dim) for dim in shape)
