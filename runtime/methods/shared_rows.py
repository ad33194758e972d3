"""Data parallelism for methods with gradients: a worker's rows, and the sums over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import mlx.core as mx

from runtime.arrays.arrays import Arrays
from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients, accumulate
from runtime.methods.protocol import ApplyGradients
from runtime.objectives.objective import grouped
from runtime.parallel.exchange import Exchange
from runtime.parallel.workers import Workers

T = TypeVar("T")


class Held:
    """Gradients of earlier micro-batches in memory, by block."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._held: dict[Block, Gradients] = {}

    def store(self, block: Block, gradients: Gradients) -> None:
        """Add a block's gradients to those that are held."""
        held = self._held.setdefault(block, {})
        accumulate(held, gradients, self._arrays)
        self._arrays.finish(held)

    def add_to(self, block: Block, gradients: Gradients) -> None:
        """Add what is held of a block to its gradients, and hold it no longer."""
        accumulate(gradients, self._held.pop(block, {}), self._arrays)
        self._arrays.finish(gradients)


class Shared:
    """Sums each block's gradients over all workers, a layer's while the next one's are computed.

    Those of the embedding and the head may be many times larger, and are summed in their place.
    """

    def __init__(
        self, exchange: Exchange, update: ApplyGradients, layers: Sequence[Block] = ()
    ) -> None:
        self._exchange, self._update, self._layers = exchange, update, layers
        self._begun: tuple[Block, list[str], list[mx.array]] | None = None

    def apply(self, block: Block, gradients: Gradients) -> None:
        """Begin to sum a layer's gradients; those of the block before are handed on."""
        if self._exchange.size == 1:
            return self._update(block, gradients)
        if block not in self._layers:
            self.finish()
            for name in list(gradients):
                da, db = map(self._exchange.add_in_place, gradients.pop(name))
                gradients[name] = da, db
            return self._update(block, gradients)
        names = list(gradients)
        arrays = [array for name in names for array in gradients.pop(name)]
        begun = block, names, self._exchange.add(arrays)
        arrays.clear()  # before the optimizer takes memory
        self.finish()
        self._begun = begun

    def finish(self) -> None:
        """Hand on the gradients whose sum has begun."""
        if self._begun is not None:
            block, names, sums = self._begun
            self._begun = None
            self._exchange.await_sums(sums)
            pairs = zip(sums[::2], sums[1::2], strict=True)
            self._update(block, dict(zip(names, pairs, strict=True)))


def own_rows(
    workers: Workers, parts: Sequence[Sequence[T]], together: int = 1
) -> list[tuple[int, Sequence[T]]]:
    """The worker's rows of each part that has any, and the number in the step of their first.

    They are whole groups of `together`, none of which is divided between parts.
    """
    groups: list[tuple[int, int, Sequence[T]]] = []  # with their parts, and numbers of first rows
    first = 0
    for part, rows in enumerate(parts):
        groups += [
            (part, first + at * together, group) for at, group in enumerate(grouped(rows, together))
        ]
        first += len(rows)
    mine = workers.mine(len(groups)).groups
    own: list[tuple[int, Sequence[T]]] = []
    for _, of_part in groupby(groups[mine.start : mine.stop], key=lambda group: group[0]):
        (_, number, rows), *others = of_part
        own.append((number, [*rows, *(row for _, _, group in others for row in group)]))
    return own
