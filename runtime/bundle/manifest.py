"""The bundle's manifest: which blocks there are, their programs, and where every byte lies.

It is plain data. `read_manifest` checks that all fields are there and of the right type;
`runtime.bundle.checks` checks references, shapes and the ranges of bytes in the weights file.
`Quality` records how much quantization has cost the model.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import msgspec

from runtime.adapters.lora import LoraSettings
from runtime.adapters.names import KEYS, VALUES, A, B
from runtime.arrays.stored import Block, Extent, File, Graph, Matrix, Record
from runtime.core.documents import is_deeper
from runtime.core.errors import BundleError
from runtime.core.stripes import Stripes
from runtime.core.typed import as_type
from runtime.core.version import of_another_version
from runtime.operations.execution import Tables
from runtime.operations.program import BlockType

HURT_NATS = 0.25
"""KL divergence per token from which the base counts as hurt: 4 bits rounded to the nearest are 0.3
to 0.6 from a model of 100 to 300 million parameters, calibrated ones 0.1 to 0.2."""


class Quality(Record, frozen=True):
    """How far a bundle's next-token predictions are from those of its checkpoint.

    divergence: the mean KL(checkpoint || bundle) of the distributions. source_loss, loss: the mean
    cross-entropies of checkpoint and bundle. All three are in nats per token, over `tokens` tokens
    in `rows` rows of `text`.
    """

    divergence: float
    source_loss: float
    loss: float
    tokens: int
    rows: int
    text: str

    @property
    def is_hurt(self) -> bool:
        """Whether quantization has changed the model so much that training should start better."""
        return self.divergence >= HURT_NATS

    def describe(self) -> str:
        """One sentence for people."""
        return (
            f"loss {self.loss:.3f}, the checkpoint's {self.source_loss:.3f}; KL divergence from it "
            f"{self.divergence:.3f} nats per token, on {self.tokens} tokens of {self.text}"
        )

    def warning(self) -> str:
        """Advice for a hurt base; empty if it is not hurt."""
        if not self.is_hurt:
            return ""
        lost = self.loss - self.source_loss
        loss = f", and its loss is {lost:.2f} nats higher" if lost > 0 else ""
        return (
            f"quantization has hurt this base: its predictions are {self.divergence:.2f} nats per "
            f"token (KL divergence) from the checkpoint's{loss}; export it again with --calibrate "
            "DATA, such as your training file, or with --bits 8"
        )


class Slice(Record, frozen=True):
    """Which part of weights.bin a bundle holds: the stripes of slice `number`, from 1, of `of`.

    `sha256` is that of the part; the manifest's own is that of the whole file.
    """

    number: int
    of: int
    sha256: str

    @property
    def stripes(self) -> Stripes:
        return Stripes(self.number - 1, self.of)

    def __str__(self) -> str:
        return f"slice {self.number} of {self.of}"


FORMAT = "ondevice-bundle"
VERSION = 6
WARNINGS = "warnings"  # in the provenance
USUAL_TOKENS = 256  # of a row where nothing else decides its length
MAX_DEPTH = 20  # of lists and objects inside each other


class Manifest(Record, frozen=True):
    """The content of manifest.json.

    `buckets` are the sequence buckets; `graphs` is keyed `GRAPH.forward.TOKENS`,
    `GRAPH.vjp.TOKENS` and `GRAPH.decode.TOKENS`. `quality` is None if it was not measured. `lora`
    is the default of new adapters in the file; `with_lora` gives the manifest those of a run or an
    adapter. `trainable` is what `ondevice train` trains where it is not told: "lora", or all
    parameters ("full"). `slice` is the part of the weights file that is there; None for all of it.
    """

    mlx_version: str
    device: str
    family: str
    config: dict[str, Any]
    hidden_size: int
    vocab_size: int
    lora: LoraSettings
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
    quality: Quality | None = None
    trainable: Literal["lora", "full"] = "lora"
    slice: Slice | None = None

    @property
    def layers(self) -> tuple[Block, ...]:
        """The blocks between the embedding and the head."""
        return self.blocks[1:-1]

    @property
    def tables(self) -> Tables:
        """The tensors and graphs to which operations refer by name."""
        return Tables(
            self.matrices,
            self.vectors,
            self.graphs,
            self.buckets,
            self.hidden_size,
            self.vocab_size,
            self.device,
        )

    @property
    def widest(self) -> int:
        """The most columns of an array between blocks: a hidden state, and what goes along."""
        types = self.block_types.values()
        return max(int(of.values[of.output][-1]) for of in types)

    @property
    def parameters(self) -> int:
        """How many values the model has."""
        matrices = sum(matrix.rows * matrix.columns for matrix in self.matrices.values())
        return matrices + sum(math.prod(extent.shape) for extent in self.vectors.values())

    @property
    def held_nbytes(self) -> int:
        """The size of the weights file that is there."""
        stripes = Stripes() if self.slice is None else self.slice.stripes
        return stripes.before(self.weights_nbytes)

    @property
    def warnings(self) -> list[str]:
        """What the export found odd about the tokenizer; whatever else stands there is none."""
        recorded = self.provenance.get(WARNINGS, [])
        texts = recorded if isinstance(recorded, list) else []
        return [text for text in texts if isinstance(text, str)]

    @property
    def usual_bucket(self) -> int:
        """The longest bucket up to USUAL_TOKENS, or the shortest: the length of rows of text."""
        return max(
            (bucket for bucket in self.buckets if bucket <= USUAL_TOKENS), default=self.buckets[0]
        )

    @property
    def bits_per_weight(self) -> float:
        """The mean bits of storage of a value in a matrix, with its share of scales and biases."""
        values = sum(matrix.rows * matrix.columns for matrix in self.matrices.values())
        return 8 * sum(matrix.nbytes for matrix in self.matrices.values()) / values

    def adapted(self, block: Block) -> tuple[str, ...]:
        """Relative names of the block's matrices that LoRA adapts, in program order.

        With a prefix, those of its attentions. The names of the embedding's and the head's are full
        ones; a head that multiplies by the embedding's matrix has none of its own.
        """
        layers = self.layers
        if block in (self.blocks[0], self.blocks[-1]):
            own = self.adaptable(block) if self.owner(block) == block else ()
            return tuple(name for name in own if self.lora.adapts(name, outside=True))
        if block not in layers[self.lora.first_layer(len(layers)) :]:
            return ()
        if self.lora.prefix:
            operations = self.block_types[block.type].operations
            return tuple(name for operation in operations for name in operation.prefixable)
        return tuple(name for name in self.adaptable(block) if self.lora.adapts(name))

    def owner(self, block: Block) -> Block:
        """The block whose adapters a block runs with: of a tied head the embedding, else itself."""
        first, last = self.blocks[0], self.blocks[-1]
        tied = block == last and self.adaptable(first) == self.adaptable(last)
        return first if tied else block

    def adapter_names(self, block: Block, name: str) -> tuple[str, str]:
        """The full names of the two tensors that adapt what `adapted` names."""
        first, second = (KEYS, VALUES) if self.lora.prefix else (A, B)
        return f"{block.tensor(name)}.{first}", f"{block.tensor(name)}.{second}"

    def adapter_shapes(self, block: Block) -> dict[str, tuple[int, int]]:
        """The shape of every tensor that adapts a block, by full name, in program order."""
        shapes = self._prefix_shapes(block) if self.lora.prefix else self._lora_shapes(block)
        return {
            full: shape
            for name, pair in shapes.items()
            for full, shape in zip(self.adapter_names(block, name), pair, strict=True)
        }

    def _lora_shapes(self, block: Block) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        rank, shapes = self.lora.rank, {}
        for name in self.adapted(block):
            matrix = self.matrices[block.tensor(name)]
            sizes = matrix.columns, matrix.rows
            inputs, outputs = sizes[::-1] if block == self.blocks[0] else sizes  # of a lookup
            shapes[name] = ((inputs, rank), (rank, outputs))
        return shapes

    def _prefix_shapes(self, block: Block) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        rows, shapes, of = self.lora.prefix, {}, self.block_types[block.type]
        chosen = self.adapted(block)
        for operation in of.operations:
            for name in operation.prefixable:
                if name in chosen:
                    keys, values = operation.prefix_widths(of.values)
                    shapes[name] = ((rows, keys), (rows, values))
        return shapes

    @property
    def first_adapted(self) -> int:
        """The index of the first block with an adapter, where a backward pass can end.

        1, that of the first layer, if no block has one.
        """
        adapted = (index for index, block in enumerate(self.blocks) if self.adapted(block))
        return next(adapted, 1)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """The last parts of the names of all matrices in layers that LoRA can adapt, sorted."""
        paths = (name for block in self.layers for name in self.adaptable(block))
        return tuple(sorted({name.split(".")[-1] for name in paths}))

    @property
    def embedding_names(self) -> tuple[str, str]:
        """The full names of the two tensors that adapt the embedding, if it is adapted."""
        block = self.blocks[0]
        return self.adapter_names(block, self.adaptable(block)[0])

    @property
    def outside_names(self) -> tuple[str, ...]:
        """The same of the embedding, and of the head where it has a matrix of its own."""
        ends = dict.fromkeys(map(self.owner, (self.blocks[0], self.blocks[-1])))
        return tuple(name.split(".")[-1] for block in ends for name in self.adaptable(block))

    @property
    def borrowed_names(self) -> tuple[str, ...]:
        """The last parts of the names of the embedding's matrices that layers look tokens up in."""
        types = self.block_types.values()
        names = {each.borrowed_matrix for of in types for each in of.operations} - {""}
        return tuple(sorted(name.split(".")[-1] for name in names))

    @property
    def expert_names(self) -> tuple[str, ...]:
        """The last parts of the names of all matrices of experts, sorted."""
        names = {
            name.split(".")[-1]
            for block in self.layers
            for operation in self.block_types[block.type].operations
            if operation.experts
            for name in operation.matrices(str)
        }
        return tuple(sorted(names))

    @property
    def table_names(self) -> tuple[str, ...]:
        """The last parts of the names of all tables that layers look tokens up in, sorted."""
        names = {
            name.split(".")[-1]
            for block in self.layers
            for operation in self.block_types[block.type].operations
            if operation.chosen_by_tokens and not operation.experts
            for name in operation.matrices(str)
        }
        return tuple(sorted(names))

    def with_lora(self, lora: LoraSettings) -> Manifest:
        """The same model with other adapters than the bundle's default."""
        return msgspec.structs.replace(self, lora=lora)

    def adaptable(self, block: Block) -> tuple[str, ...]:
        """Relative names of the block's matrices that LoRA can adapt, in program order."""
        operations = self.block_types[block.type].operations
        return tuple(name for operation in operations for name in operation.adaptable)

    def matrices_of(self, block: Block) -> list[Matrix]:
        """The matrices by which a block multiplies."""
        return [
            self.matrices[name]
            for operation in self.block_types[block.type].operations
            for name in operation.multiplied(block.tensor)
        ]


def block_range(manifest: Manifest, block: Block) -> tuple[int, int]:
    """Where in weights.bin a block's tensors begin and end."""
    block_type = manifest.block_types[block.type]
    vectors = [block.tensor(name) for name in block_type.parameters]
    matrices: list[str] = []
    for operation in block_type.operations:
        matrices += operation.matrices(block.tensor)
        vectors += operation.vectors(block.tensor)
    extents = [manifest.vectors[name] for name in vectors]
    extents += [part for name in matrices for part in manifest.matrices[name].extents]
    return (
        min(extent.offset for extent in extents),
        max(extent.offset + extent.nbytes for extent in extents),
    )


def dense_range(manifest: Manifest, block: Block) -> tuple[int, int]:
    """Where in weights.bin the part of a block is that is read whatever its tokens are.

    It ends where the first tensor begins of which tokens choose parts.
    """
    start, stop = block_range(manifest, block)
    chosen = [
        manifest.matrices[name].packed.offset
        for operation in manifest.block_types[block.type].operations
        if operation.chosen_by_tokens
        for name in operation.matrices(block.tensor)
    ]
    return start, min([stop, *chosen])


def read_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in the bytes of a manifest.json.

    Raises:
        BundleError: the document is damaged or of another version; the message names the place.
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise BundleError(f"{where} is damaged: {problem}") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise BundleError(f"{where} is no {FORMAT} manifest")
    stamp, provenance = document.pop("version", None), document.get("provenance")
    writer = provenance.get("exporter") if isinstance(provenance, dict) else None
    if other := of_another_version(stamp, VERSION, "export the model again", writer):
        raise BundleError(f"{where}: {other}")
    if is_deeper(document, MAX_DEPTH):
        raise BundleError(f"{where} is nested too deeply")
    try:
        return as_type(document, Manifest)
    except (ValueError, RecursionError) as problem:
        raise BundleError(f"{where}: {problem}") from None


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    document = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(manifest)}
    return json.dumps(document, indent=1, sort_keys=False).encode()
