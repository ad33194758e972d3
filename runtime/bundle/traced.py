"""The record of graphs that were traced in the cache folder, in place of a bundle's own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from runtime.arrays.stored import Block, Graph, Record
from runtime.bundle.manifest import Manifest
from runtime.core.errors import BundleError
from runtime.core.files import reading_errors, sha256_file
from runtime.core.typed import decoded
from runtime.operations.program import BlockType

RECORD = "traced"  # beside the graphs, and written last: its SHA-256, a newline, and JSON


class TracedGraphs(Record, frozen=True):
    """Replacements of the same fields of a manifest. Files are relative to the record's."""

    mlx_version: str
    device: str
    block_types: dict[str, BlockType]
    blocks: tuple[Block, ...]
    graphs: dict[str, Graph]

    def put_into(self, manifest: Manifest) -> Manifest:
        """The manifest with these graphs and programs.

        Raises:
            BundleError: the manifest's own programs compute something else.
        """
        check_programs(manifest, self.block_types, self.blocks)
        return msgspec.structs.replace(
            manifest,
            mlx_version=self.mlx_version,
            device=self.device,
            block_types=self.block_types,
            graphs=self.graphs,
        )


def check_programs(
    manifest: Manifest, block_types: dict[str, BlockType], blocks: tuple[Block, ...]
) -> None:
    """Check that a manifest's programs are those of the model that its configuration describes.

    What its graphs compute cannot be told from the manifest, so of these only the values count.

    Raises:
        BundleError: they differ.
    """
    bucket = manifest.buckets[0]
    same = [block.type for block in blocks] == [block.type for block in manifest.blocks] and all(
        _meaning(block_type, bucket) == _meaning(manifest.block_types[name], bucket)
        for name, block_type in block_types.items()
    )
    if not same:
        raise BundleError(
            "the mlx-lm that is installed computes the model in another way than the bundle's "
            "manifest says, so that the weights may not fit; export the model again"
        )


def _meaning(block_type: BlockType, bucket: int) -> tuple[object, ...]:
    """A block type's values and parameters, and the functions and weights of its operations."""
    return (
        block_type.input,
        block_type.output,
        block_type.values,
        block_type.parameters,
        [
            (operation.label, operation.results)
            if operation.graph_keys(bucket, backward=False)
            else operation
            for operation in block_type.operations
        ],
    )


def traced_bytes(traced: TracedGraphs) -> bytes:
    """The bytes of the record's file."""
    record = msgspec.json.encode(traced)
    return hashlib.sha256(record).hexdigest().encode() + b"\n" + record


def read_traced(folder: Path) -> TracedGraphs:
    """The record in a folder of traced graphs, whose files are all there with their checksums.

    Raises:
        BundleError: a file is missing or altered.
    """
    path = folder / RECORD
    with reading_errors(path):
        checksum, _, record = path.read_bytes().partition(b"\n")
    if hashlib.sha256(record).hexdigest().encode() != checksum:
        raise BundleError(f"{path} is altered: its SHA-256 differs")
    try:
        traced = decoded(record, TracedGraphs)
    except ValueError as problem:  # of another version
        raise BundleError(f"{path} is not as expected: {problem}") from None
    for graph in traced.graphs.values():
        file = folder / graph.file
        with reading_errors(file):
            if sha256_file(file) != graph.sha256:
                raise BundleError(f"{file} is altered: its SHA-256 differs")
    return traced
