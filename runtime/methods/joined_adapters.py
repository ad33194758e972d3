"""PEFT's adapters of transformers' modules, as the matrices here of which these are made.

A module there may hold rows of several of our matrices, as a fused query, key and value has. PEFT
trains one A for all of them. `ondevice adapter --to peft` writes their own ones: n adapters of rank
r lie side by side in an A of rank n r, and B is 0 outside of each one's rows. One of our matrices
may also be several modules there, whose A must then be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.adapters.names import A, B, Shape
from runtime.adapters.origins import Origin, elsewhere
from runtime.bundle.manifest import Manifest

F32 = npt.NDArray[np.float32]
Read = Callable[[str], F32]


class Piece(NamedTuple):
    """A part of one of our adapters: a module there, its ranks, and the rows of its matrix."""

    module: str
    ranks: slice
    rows: slice


def pieces_of(
    shapes: Mapping[str, Shape], manifest: Manifest, rank: int, read: Read
) -> dict[str, list[Piece]]:
    """Of each of our adapted modules the pieces of it there, in order; none of other modules.

    `shapes` are those of tensors by transformers' names, A (in, n r) and B (n r, out); `read` gives
    their values.

    Raises:
        ValueError: in words, if these are no adapters of our matrices.
    """
    matrices = [
        block.tensor(name) for block in manifest.blocks for name in manifest.adaptable(block)
    ]
    rows = {own: manifest.matrices[own].rows for own in matrices}
    parts = elsewhere(manifest.family, manifest.provenance, rows, "--adapter")
    holders: dict[str, list[tuple[str, Origin]]] = {}
    for own, places in parts.items():
        for module, part in places:
            holders.setdefault(module, []).append((own, part))
    ranks: dict[tuple[str, str], slice] = {}  # by our module, and the one there
    for module, held in holders.items():
        a, b = (shapes.get(f"{module}.{part}", ()) for part in (A, B))
        if len(a) == len(b) == 2 and a[1] == b[0]:
            whole = len(held) == 1
            of_matrices = {held[0][0]: slice(None)} if whole else _ranks(module, held, rank, read)
            ranks |= {(own, module): of for own, of in of_matrices.items()}
    pieces: dict[str, list[Piece]] = {}
    for own, places in parts.items():
        known = [(module, part) for module, part in places if (own, module) in ranks]
        if known and len(known) < len(places):
            raise ValueError(f"it adapts {known[0][0]}, and not all modules that {own} is made of")
        for module, part in known:
            every = len(places) == 1 and part.rows == part.height  # of an embedding, too
            taken = slice(None) if every else slice(part.first, part.first + part.rows)
            pieces.setdefault(own, []).append(Piece(module, ranks[own, module], taken))
    return pieces


def _ranks(module: str, held: list[tuple[str, Origin]], rank: int, read: Read) -> dict[str, slice]:
    """Which ranks of a module's adapter are those of each of our matrices that it adapts."""
    b = read(f"{module}.{B}")
    count, odd = divmod(len(b), rank)
    where = {own: slice(part.first, part.first + part.rows) for own, part in held}
    if count == 1 and not odd:  # one A for all that B reaches
        reached = [own for own, rows in where.items() if b[:, rows].any()]
        return dict.fromkeys(reached or where, slice(None))
    of_matrices: dict[str, slice] = {}
    for number in range(count):
        ranks = slice(number * rank, (number + 1) * rank)
        reached = [own for own, rows in where.items() if b[ranks, rows].any()]
        if not reached and count == len(where):  # not trained yet
            reached = [held[number][0]]
        of_matrices |= dict.fromkeys(reached, ranks) if len(reached) == 1 else {}
    if odd or len(of_matrices) != count:
        names = ", ".join(where)
        raise ValueError(
            f"{module} has an adapter of rank {len(b)}, which is not made of adapters of rank "
            f"{rank} of {names}, its matrices here"
        )
    return of_matrices


def joined(name: str, pieces: list[Piece], read: Read) -> F32:
    """One of our tensors from its pieces. Raises ValueError if they have different A."""
    part = name.rpartition(".")[2]
    values = [
        read(f"{piece.module}.{A}")[:, piece.ranks]
        if part == A
        else read(f"{piece.module}.{B}")[piece.ranks, piece.rows]
        for piece in pieces
    ]
    if part == B:
        return np.ascontiguousarray(np.concatenate(values, axis=1))
    if any(not np.array_equal(value, values[0]) for value in values):
        raise ValueError(
            f"{', '.join(piece.module for piece in pieces)} are one matrix here, and have "
            "different A"
        )
    return np.ascontiguousarray(values[0])
