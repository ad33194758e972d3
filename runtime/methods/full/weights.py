"""All weights of a model, trained in place on disk: read, updated, perturbed and written by tiles.

theta <- theta - rate (mean over queries of g z + weight_decay theta), in float32, then rounded to
the type in which theta is stored. Norms and biases have no weight decay, as in MeZO's own code.
An update is applied to a block when the next step visits it, and written back in the same
visit (ZO2, section 5). A block that has not been visited yet has updates pending, which every read
takes into account.

The bundle's weights are version 0 of every block. Later versions lie in the slots of a file of the
run (`runtime.storage.slots`); a version is the number of steps that a block has seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.arrays.arrays import quiet, view
from runtime.arrays.stored import ITEM_BYTES, Block, Matrix
from runtime.arrays.weight_source import FloatTile, WeightSource, new_rows
from runtime.bundle.manifest import Manifest
from runtime.methods.full.row_noise import RowNoise
from runtime.methods.full.stored_floats import F32, Octets, expand, rounded
from runtime.methods.log_header import Part
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Update
from runtime.operations.values import F32 as F32_BYTES
from runtime.storage.read_ahead import ReadAhead
from runtime.storage.slots import SlotLayout, Slots, Whole

Indices = npt.NDArray[np.int64]
_FIRST = np.zeros(1, np.int64)  # the only row of a vector
STREAMED_VALUES = 1 << 18  # of a tile that is updated although no product reads it


def trained_tensors(manifest: Manifest) -> list[dict[str, tuple[int, int, str]]]:
    """For each block the rows, columns and stored type of each tensor that it owns, by name.

    A tensor that several blocks use belongs to the last one. Vectors have one row.
    """
    users: dict[str, int] = {}
    for index, block in enumerate(manifest.blocks):
        block_type = manifest.block_types[block.type]
        users |= {block.tensor(name): index for name in block_type.parameters}
        for operation in block_type.operations:
            for name in (*operation.vectors(block.tensor), *operation.matrices(block.tensor)):
                users[name] = index
    of_blocks: list[dict[str, tuple[int, int, str]]] = [{} for _ in manifest.blocks]
    for name, index in users.items():
        if name in manifest.vectors:
            of_blocks[index][name] = (1, math.prod(manifest.vectors[name].shape), "float32")
        else:
            matrix = manifest.matrices[name]
            of_blocks[index][name] = (matrix.rows, matrix.columns, matrix.packed.dtype)
    return of_blocks


def slot_layouts(manifest: Manifest) -> list[SlotLayout]:
    """The tensors in the slots of each block, with their bytes."""
    return [
        SlotLayout(
            {
                name: rows * columns * ITEM_BYTES[dtype]
                for name, (rows, columns, dtype) in own.items()
            }
        )
        for own in trained_tensors(manifest)
    ]


@dataclass
class _Visit:
    """A block that is being written: where to, and how many rows of each tensor are."""

    index: int
    slot: int
    written: dict[str, int]


@dataclass(eq=False)
class FullWeights(Part):
    """A source of weights that training changes.

    `updates` are those of steps that some block has not seen, by step; `done` is how many steps
    there have been. Without `slots` nothing is written, and every read applies all updates to the
    bundle's weights.

    Weights of 16 bits are rounded up or down at random, right on average: to the nearest value
    they would lose most of MeZO's small updates.
    """

    log_fields = ("trained",)
    manifest: Manifest
    base: WeightSource
    slots: Slots | None
    noise: RowNoise
    done: int = 0
    updates: dict[int, Update | None] = field(default_factory=dict)
    ahead: ReadAhead | None = None
    _whole: list[Whole | None] = field(init=False)
    _seen: list[int] = field(init=False)  # how many steps each block has seen
    _visit: _Visit | None = field(default=None, init=False)
    _buffers: dict[str, F32] = field(default_factory=dict, init=False, repr=False)
    _drawn: tuple[object, ...] = field(default=(), init=False, repr=False)

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        if (trained := fields.get("trained")) != "full":
            raise ValueError(f"what it trains is {trained!r}")
        if others := fields.keys() - {*cls.log_fields, *Noise.log_fields}:
            raise ValueError(f"it trains all weights, and has {', '.join(sorted(others))}")

    def header(self) -> dict[str, Any]:
        return {"trained": "full"}

    def __post_init__(self) -> None:
        self.tensors = trained_tensors(self.manifest)
        self.owner = {name: i for i, own in enumerate(self.tensors) for name in own}
        self._names = {m.packed.offset: name for name, m in self.manifest.matrices.items()}
        self._indices = {block: index for index, block in enumerate(self.manifest.blocks)}
        self._whole = [
            None if self.slots is None else self.slots.newest(index, self.done)
            for index in range(len(self.tensors))
        ]
        self._seen = [0 if whole is None else whole.version for whole in self._whole]
        self._vectors: dict[str, F32] = {}
        for name in self.manifest.vectors:
            _, columns, _ = self.tensors[self.owner[name]][name]
            self._vectors[name] = self._stored_rows(name, 0, 1, np.empty((1, columns), np.float32))

    def behind(self, updates: int) -> int:
        """How many blocks lack more than so many updates."""
        return sum(len(self._pending(index)) > updates for index in range(len(self.tensors)))

    # Reads of kernels.

    def vector(self, name: str) -> mx.array:
        """A norm weight or bias, float32, with all updates."""
        value, visit = self._vectors[name], self._visit
        if visit is None or visit.index != self.owner[name]:
            value = value.copy()
            self._apply(name, _FIRST, value)
        return mx.array(value.reshape(self.manifest.vectors[name].shape))

    def tile(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        """Rows start:stop of a matrix with all updates; in a visit they are also written."""
        name = self._names[matrix.packed.offset]
        values, filled = new_rows(stop - start, matrix.columns)
        self._fill(name, start, stop, filled)
        return FloatTile(values)

    def columns(self, matrix: Matrix, start: int, stop: int) -> FloatTile:
        """Never: weights that are trained are read by rows, in the order of their noise."""
        raise AssertionError(f"{self.name_of(matrix)} is read by columns, and is trained")

    def gather(self, matrix: Matrix, rows: Indices) -> FloatTile:
        """Chosen rows of a matrix with all updates, in the given order; none is written."""
        name = self._names[matrix.packed.offset]
        distinct, places = np.unique(rows, return_inverse=True)
        table = np.empty((len(distinct), matrix.columns), np.float32)
        index = self.owner[name]
        if (whole := self._whole[index]) is None:
            tile = self.base.gather(matrix, distinct)
            assert isinstance(tile, FloatTile)
            table[...] = view(tile.values.astype(mx.float32))
        else:
            assert self.slots is not None
            dtype = self.tensors[index][name][2]
            octets = np.empty((len(distinct), matrix.columns * ITEM_BYTES[dtype]), np.uint8)
            self.slots.read_rows(index, whole.slot, name, distinct.tolist(), octets)
            expand(octets.reshape(-1), dtype, table)
        self._apply(name, distinct, table)
        values, filled = new_rows(len(rows), matrix.columns)
        np.take(table, places, axis=0, out=filled)
        return FloatTile(values)

    def read_ahead(self, block: Block) -> None:
        """Begin to bring a block into the system's file cache."""
        whole = self._whole[self._indices[block]]
        if whole is None or self.slots is None:
            self.base.read_ahead(block)
            return
        self.slots.read_ahead(self._indices[block], whole.slot)
        if self.ahead is not None:
            self.ahead.request(*self.slots.extent(self._indices[block], whole.slot))

    def release(self, block: Block) -> None:
        """Drop the pages of the bundle; of the slots nothing is mapped."""
        self.base.release(block)

    def stored(self, name: str, start: int, stop: int) -> Octets:
        """The bytes of rows of a tensor with all updates, in the type in which it is stored."""
        _, columns, dtype = self.tensors[self.owner[name]][name]
        values = np.empty((stop - start, columns), np.float32)
        self._stored_rows(name, start, stop, values)
        octets = self._apply(name, np.arange(start, stop), values)
        return rounded(values, dtype) if octets is None else octets

    # Updates.

    def learn(self, update: Update | None) -> None:
        """Take the update of the next step, None for a step that was skipped."""
        self.updates[self.done] = update
        self.done += 1

    def begin(self, block: Block) -> None:
        """Begin to write a block with its pending updates, as its tiles are read."""
        index = self._indices[block]
        assert self._visit is None, "another block is being written"
        assert self.slots is not None, "these weights are only read"
        if not self._pending(index):
            self._seen[index] = self.done
            return
        before = self._whole[index]
        slot = 0 if before is None else 1 - before.slot
        self._visit = _Visit(index, slot, dict.fromkeys(self.tensors[index], 0))
        for name in self.tensors[index]:
            if name in self._vectors:
                self._visit.written[name] = 1
                stored = self._apply(name, _FIRST, self._vectors[name])
                assert stored is not None
                self.slots.write(index, slot, name, 0, stored)

    def finish(self, block: Block) -> None:
        """End the visit of a block: update and write the unread rows, and the header.

        Raises:
            StorageError: the disk is full.
        """
        visit = self._visit
        if visit is None or self.slots is None:
            return
        assert visit.index == self._indices[block], "another block is being written"
        for name, (rows, columns, _) in self.tensors[visit.index].items():
            step = max(1, STREAMED_VALUES // columns)
            for start in range(visit.written[name], rows, step):
                stop = min(rows, start + step)
                self._fill(name, start, stop, np.empty((stop - start, columns), np.float32))
        self.slots.finish(visit.index, visit.slot, self.done)
        self._whole[visit.index] = Whole(visit.slot, self.done)
        self._seen[visit.index] = self.done
        self._visit = None
        for step in [step for step in self.updates if step < min(self._seen)]:
            del self.updates[step]

    def digest(self) -> str:
        """The SHA-256 of all weights that have been written; an update may be pending in them."""
        assert self.slots is not None, "these weights are only read"
        sha256 = hashlib.sha256()
        for index, whole in enumerate(self._whole):
            sha256.update(b"" if whole is None else self.slots.digest(index, whole.slot))
        return sha256.hexdigest()

    def settle(self) -> None:
        """Write all blocks with all updates."""
        for block in self.manifest.blocks:
            self.begin(block)
            self.finish(block)

    def _pending(self, index: int) -> list[Update]:
        """The updates that a block's slot lacks."""
        updates = (self.updates[step] for step in range(self._seen[index], self.done))
        return [update for update in updates if update is not None]

    def _fill(self, name: str, start: int, stop: int, values: F32) -> None:
        """Rows of a matrix with all updates, written if its block is being visited."""
        self._stored_rows(name, start, stop, values)
        visit = self._visit
        stored = self._apply(name, np.arange(start, stop), values)
        if visit is None or self.owner[name] != visit.index or self.slots is None:
            return
        assert visit.written[name] == start, "a tile is read twice in one visit"
        visit.written[name] = stop
        _, columns, dtype = self.tensors[visit.index][name]
        assert stored is not None
        first = start * columns * ITEM_BYTES[dtype]
        self.slots.write(visit.index, visit.slot, name, first, stored)

    def _stored_rows(self, name: str, start: int, stop: int, out: F32) -> F32:
        """Rows as they lie on disk, without pending updates, in `out`."""
        index = self.owner[name]
        _, columns, dtype = self.tensors[index][name]
        whole = self._whole[index]
        if whole is None:
            if name in self.manifest.vectors:
                out[0] = view(self.base.vector(name)).reshape(-1)
            else:
                tile = self.base.tile(self.manifest.matrices[name], start, stop)
                assert isinstance(tile, FloatTile)
                octets = tile.values if dtype == "float32" else tile.values.view(mx.uint16)
                mx.eval(octets)
                expand(np.asarray(octets).reshape(-1).view(np.uint8), dtype, out)
            return out
        assert self.slots is not None
        size = (stop - start) * columns * ITEM_BYTES[dtype]
        octets_read = self._buffer("read", -(-size // F32_BYTES)).view(np.uint8)[:size]
        self.slots.read(index, whole.slot, name, start * columns * ITEM_BYTES[dtype], octets_read)
        expand(octets_read, dtype, out)
        return out

    @quiet
    def _apply(self, name: str, chosen: Indices, values: F32) -> Octets | None:
        """Apply the pending updates to rows in place; returns the stored bytes of the last."""
        index = self.owner[name]
        _, columns, dtype = self.tensors[index][name]
        stored = None
        decays = name not in self.manifest.vectors
        for update in self._pending(index):
            total = self._buffer("sum", values.size).reshape(values.shape)
            np.multiply(values, np.float32(update.weight_decay if decays else 0), out=total)
            for query, gradient in enumerate(update.gradients):
                z = self._noise_of(update.step, query, name, chosen, values.shape)
                np.multiply(z, np.float32(gradient / len(update.gradients)), out=z)
                self._drawn = ()  # the noise has been scaled
                np.add(total, z, out=total)
            np.multiply(total, np.float32(update.rate), out=total)
            np.subtract(values, total, out=values)
            integers = (
                0 if dtype == "float32" else self.noise.integers(update.step, name, chosen, columns)
            )
            stored = rounded(values, dtype, integers)
            expand(stored, dtype, values)
        return stored

    def _noise_of(
        self, step: int, query: int, name: str, chosen: Indices, shape: tuple[int, ...]
    ) -> F32:
        """z of rows, in memory that the next call reuses; not drawn again for the same rows."""
        z = self._buffer("z", shape[0] * shape[1]).reshape(shape)
        drawn = (step, query, name, chosen.tobytes())
        if self._drawn == drawn:
            return z
        if (np.diff(chosen) == 1).all():
            self.noise.draw(step, query, name, int(chosen[0]), z)
        else:
            self.noise.draw_rows(step, query, name, chosen, z)
        self._drawn = drawn
        return z

    def _buffer(self, purpose: str, size: int) -> F32:
        """Reused memory of at least `size` values, cut to size."""
        known = self._buffers.get(purpose)
        if known is None or known.size < size:
            self._buffers[purpose] = known = np.empty(size, np.float32)
        return known[:size]

    @quiet
    def moved(
        self, step: int, query: int, by: float, name: str, chosen: Indices, values: mx.array
    ) -> mx.array:
        """values + by z for rows (N, C) of a tensor, evaluated."""
        mx.eval(values)
        moved, filled = new_rows(*values.shape)
        z = self._noise_of(step, query, name, chosen, values.shape)
        np.multiply(z, np.float32(by), out=filled)
        np.add(filled, view(values), out=filled)
        return moved

    def name_of(self, matrix: Matrix) -> str:
        """The name of a matrix that kernels know by where it lies."""
        return self._names[matrix.packed.offset]


@dataclass(frozen=True, eq=False)
class Perturbation:
    """theta + by z of one step and query, as a `runtime.arrays.values.Move`."""

    weights: FullWeights
    step: int
    query: int
    by: float

    def vector(self, name: str, value: mx.array) -> mx.array:
        return self._moved(name, _FIRST, value.reshape(1, -1)).reshape(value.shape)

    def tile(self, matrix: Matrix, start: int, values: mx.array) -> mx.array:
        chosen = np.arange(start, start + values.shape[0])
        return self._moved(self.weights.name_of(matrix), chosen, values)

    def rows(self, matrix: Matrix, chosen: Indices, values: mx.array) -> mx.array:
        return self._moved(self.weights.name_of(matrix), chosen, values)

    def _moved(self, name: str, chosen: Indices, values: mx.array) -> mx.array:
        return self.weights.moved(self.step, self.query, self.by, name, chosen, values)
