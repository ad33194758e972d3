"""Visits of blocks, one after another, so that the weights of one block are held at a time.

A visit begins to read the next block ahead, counts its time and memory as its block's, and frees
the block's weights when it ends, by an exception too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from runtime.arrays.stored import Block
from runtime.engine.model import Model

Direction = Literal["forward", "backward"]


@dataclass
class Visit:
    """A block, at `index` among the model's, while its weights may be in memory."""

    model: Model
    index: int
    _released: bool = False

    @property
    def block(self) -> Block:
        return self.model.blocks[self.index]

    def release(self) -> None:
        """Free the block's weights now, where the rest of the visit needs the memory."""
        if not self._released:
            self._released = True
            self.model.release(self.block)


@contextmanager
def visit(model: Model, index: int, direction: Direction = "forward") -> Iterator[Visit]:
    """One visit, which reads nothing ahead: of the embedding (0), or of the head (-1)."""
    current = Visit(model, index)
    with model.profile.block(current.block.label, direction):
        try:
            yield current
        finally:
            current.release()


def visits(
    model: Model, layers: range | None = None, direction: Direction = "forward"
) -> Iterator[Visit]:
    """Visits of `layers`, by their indices among the blocks; of all transformer layers without.

    While a layer is visited, the next block in this direction is read ahead: after the last layer
    of a forward pass the block that follows it, and after that of a backward pass none.
    """
    layers = range(1, len(model.blocks) - 1) if layers is None else layers
    by = 1 if direction == "forward" else -1
    for index in layers[::by]:
        following = index + by
        if direction == "forward" or following in layers:
            model.read_ahead(model.blocks[following])
        with visit(model, index, direction) as current:
            yield current
