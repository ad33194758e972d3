"""Sums over tokens of the products of a matrix's inputs: the Hessian of its squared output error.

For W (R, C) and inputs X (T, C) the squared error of the products is tr((W - Q) H (W - Q)^T) with
H = X^T X. The Hessian of a wide matrix is larger than the matrix, so that only its blocks on the
diagonal may be computed: columns of different blocks then count as uncorrelated. The blocks follow
the columns' own order, which is known before the first token.
"""

from __future__ import annotations

import numpy as np

from export.stored import F32

ALIGN = 128  # columns: blocks start at multiples, which are starts of groups too
TILE = 128  # rows of a block that are computed at a time


def block_extents(columns: int, block: int) -> tuple[tuple[int, int], ...]:
    """The (start, stop) of blocks of at most `block` columns, about equal, multiples of ALIGN.

    A matrix of at most `block` columns is one block.
    """
    if columns <= block:
        return ((0, columns),)
    if block < ALIGN:
        raise ValueError(f"a block of {block} columns is smaller than {ALIGN}")
    units = -(-columns // ALIGN)
    count = -(-units // (block // ALIGN))
    starts = [ALIGN * (units * i // count) for i in range(count)]
    return tuple(zip(starts, [*starts[1:], columns], strict=True))


def gram_bytes(columns: int, block: int) -> int:
    """The bytes of a `Gram` of these columns."""
    return sum(4 * (stop - start) ** 2 for start, stop in block_extents(columns, block))


def add_bytes(columns: int, block: int) -> int:
    """The bytes that `Gram.add` takes on top while it runs."""
    widest = max(stop - start for start, stop in block_extents(columns, block))
    return 4 * min(TILE, widest) * widest


class Gram:
    """The blocks on the diagonal of X^T X, float32, for inputs X of `columns` columns.

    blocks: of `block_extents`, (n, n); only their upper triangles are filled.  tokens: the rows of
    X so far.
    """

    def __init__(self, columns: int, block: int) -> None:
        self.columns = columns
        self.extents = block_extents(columns, block)
        self.blocks = [np.zeros((stop - start,) * 2, np.float32) for start, stop in self.extents]
        self.tokens = 0

    def add(self, x: F32) -> None:
        """Add the inputs (T, C) of some tokens."""
        if x.shape[1] != self.columns or not self.blocks:
            raise ValueError(f"inputs {x.shape} for {self.columns} columns, or after take()")
        for (start, stop), block in zip(self.extents, self.blocks, strict=True):
            for row in range(start, stop, TILE):
                end = min(row + TILE, stop)
                upper = block[row - start : end - start, row - start :]
                upper += x[:, row:end].T @ x[:, row:stop]
        self.tokens += len(x)

    def take(self) -> list[F32]:
        """The blocks, which are the caller's from now on; nothing can be added afterwards."""
        blocks, self.blocks = self.blocks, []
        return blocks

    @property
    def mean_diagonal(self) -> float:
        """The mean of all blocks' diagonals."""
        return float(sum(np.trace(block, dtype=np.float64) for block in self.blocks) / self.columns)


def tied_hessian(head: Gram) -> Gram:
    """For an embedding that is the head too: the head's Hessian over its mean diagonal, plus one.

    The head's inputs are correlated; a lookup reads each column with the same weight. Takes over
    the blocks of `head`.
    """
    mean = head.mean_diagonal
    for block in head.blocks:
        if mean > 0:
            block *= np.float32(1 / mean)
        block[np.diag_indices(len(block))] += 1
    return head
