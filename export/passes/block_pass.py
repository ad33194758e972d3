"""A forward pass of rows through all blocks that stops before the products of each block.

Between two stops the values of all rows are in a scratch file, and few rows are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from export.stored import F32
from runtime.arrays.arrays import view
from runtime.arrays.values import Loras, Values
from runtime.engine.model import Model, Positions
from runtime.engine.sample import Row
from runtime.engine.visits import visit
from runtime.methods.adapters import Adapters
from runtime.operations.program import Program
from runtime.operations.values import bytes_at
from runtime.plan.lower import LoweredBlock
from runtime.run.session import Session
from runtime.storage.activations import RowValues


@dataclass(frozen=True)
class RowProducts:
    """Products of one input with one or several matrices, which are about to be computed.

    inputs: (T, C) of each row, to be read at once, since memory is reused. None where tokens choose
    parts of the matrices, such as experts: each part sees some tokens only.
    """

    names: tuple[str, ...]  # of the matrices
    inputs: Callable[[], Iterator[F32]] | None


class RowPass:
    """One pass of rows through the blocks of a session's models.

    As many rows as the plan has batch lanes are in memory together, so that each tile of weights is
    read once for all of them. Blocks run with `adapters`, where there are any.
    """

    def __init__(
        self,
        session: Session,
        rows: Sequence[Row],
        scratch: Path,
        check_budget: Callable[[], None],
        adapters: Adapters | None = None,
    ) -> None:
        self.rows = rows
        self.adapters = adapters
        self.check_budget = check_budget
        self.models = [session.model(len(row.tokens) - 1) for row in rows]
        self.groups = _groups(self.models, session.plan.lanes)
        sizes = [_waiting_bytes(self.models[group[0]]) for group in self.groups]
        self.values = RowValues(scratch, len(rows), max(sizes))

    def embed(self) -> None:
        """Run the first block."""
        with self._visit(0):
            for index, (row, model) in enumerate(zip(self.rows, self.models, strict=True)):
                x = model.embed(row.tokens[:-1].astype(np.int64), self.loras(0))
                self.values.put(index, {_input_of(model, 1): x})
                del x
                self.check_budget()

    def layer(self, index: int) -> Iterator[RowProducts]:
        """Run a layer, stopping before every product.

        The matrices are read after the caller has gone on, so that the caller may replace them.
        """
        lowered = self.models[0].lowered.blocks[index]
        begin = 0
        with self._visit(index):
            for stop, instruction in enumerate(lowered.forward):
                names = instruction.operation.matrices(lowered.block.tensor)
                if not names:
                    continue
                self._run(index, begin, stop)
                begin = stop
                name, *others = instruction.operation.activations
                unseen = others or instruction.operation.chosen_by_tokens
                yield RowProducts(names, None if unseen else partial(self._inputs, name))
            self._run(index, begin, len(lowered.forward))
            for row, model in enumerate(self.models):
                values = self.values.get(row)
                output = values.pop(model.lowered.blocks[index].program.output)
                self.values.put(row, {_input_of(model, index + 1): output})
                del output

    def head(self) -> RowProducts:
        """The product that the head is about to compute."""
        last = self.models[0].lowered.blocks[-1]
        assert last.head is not None
        return RowProducts(last.head.matrices(last.block.tensor), self._hidden)

    def hidden(self, row: int, scored: Positions) -> mx.array:
        """The head's input (N, D) at the positions `scored` (N,) of a row."""
        (x,) = self.values.get(row).values()
        return self.models[row].hidden(x, scored)

    def loras(self, index: int) -> Loras:
        """The adapters of a block."""
        block = self.models[0].blocks[index]
        return {} if self.adapters is None else self.adapters.loras(block)

    def _hidden(self) -> Iterator[F32]:
        with self._visit(-1):
            for index, row in enumerate(self.rows):
                yield view(self.hidden(index, np.arange(len(row.tokens) - 1)))
                self.check_budget()

    def _run(self, index: int, begin: int, stop: int) -> None:
        """Run the instructions begin:stop of a block for every row."""
        for group in self.groups if begin < stop else ():
            model = self.models[group[0]]
            lowered = model.lowered.blocks[index]
            loras = self.loras(index)
            lanes: list[Values] = [self.values.get(row) for row in group]
            model.executor.forward(
                lowered,
                lowered.forward[begin:stop],
                model.bucket,
                lanes,
                [loras] * len(group),
            )
            for row, values in zip(group, lanes, strict=True):
                self.values.put(row, values)
            self.check_budget()

    def _inputs(self, name: str) -> Iterator[F32]:
        for index, row in enumerate(self.rows):
            value = self.values.get(index)[name].squeeze(0)
            yield view(value)[: len(row.tokens) - 1]
            self.check_budget()

    def _visit(self, index: int) -> ExitStack:
        """A visit of a block by the models of all buckets: each has tiles of its own."""
        models = {model.bucket: model for model in self.models}
        with ExitStack() as visiting:
            for model in models.values():
                visiting.enter_context(visit(model, index))
            return visiting.pop_all()


def _groups(models: Sequence[Model], most: int) -> list[list[int]]:
    """The rows of each model, in groups of at most so many."""
    rows: dict[int, list[int]] = {}
    for index, model in enumerate(models):
        rows.setdefault(model.bucket, []).append(index)
    return [
        of_bucket[start : start + most]
        for of_bucket in rows.values()
        for start in range(0, len(of_bucket), most)
    ]


def _input_of(model: Model, index: int) -> str:
    return model.lowered.blocks[index].program.input


def _waiting_bytes(model: Model) -> int:
    """The most bytes of a row's values between two instructions of any block."""
    return max(_most_alive(block, model.bucket) for block in model.lowered.blocks)


def _most_alive(lowered: LoweredBlock, tokens: int) -> int:
    program = lowered.program
    alive = {program.input} - {""}
    most = _bytes(program, alive, tokens)
    for instruction in lowered.forward:
        alive = (alive | set(instruction.wanted)) - set(instruction.frees)
        most = max(most, _bytes(program, alive, tokens))
    return most


def _bytes(program: Program, names: set[str], tokens: int) -> int:
    return sum(bytes_at(program.values[name], tokens) for name in names)
