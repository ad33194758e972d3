"""Memory-efficient backpropagation: Algorithm 1 of the MeBP paper.

Forward block by block, keeping only each block's input; then the blocks in reverse, each
recomputing what its backward needs. All rows of a micro-batch visit a block together, so a block's
gradients are complete, applied and freed before the next block's backward begins. With clipping
they go to a scratch file instead, and are applied once their norm is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients, Loras, Values, accumulate
from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.methods.adapters import Adapters
from runtime.methods.clipping import Clipping
from runtime.methods.dropout import StepDropout
from runtime.methods.optimizer import Optimizer, moments
from runtime.methods.protocol import Models, Start, StepLoss, StepResult, Update
from runtime.plan.demand import Demand
from runtime.storage.activations import Activations

Kept = dict[tuple[int, int], Values]  # by block and row


@dataclass(frozen=True)
class Backprop:
    """Exact gradients over a model.

    `activations` holds a slot per block for each row; `lanes` rows go through each block together
    in the forward pass. The last `kept_layers` layers keep what their backward needs; the others
    recompute it. `dropout` is that of the step.
    """

    model: Model
    adapters: Adapters
    activations: Activations
    lanes: int = 1
    kept_layers: int = 0
    dropout: StepDropout | None = None

    def gradients(self, rows: Sequence[Sample], tokens: int, update: Update) -> StepLoss:
        """Compute the gradients of sum(loss) / `tokens` over `rows`, and hand them to `update`."""
        kept = self._forward(rows)
        result = self._head(rows, tokens)
        blocks = self.model.blocks
        last = self.model.lowered.first_adapted
        for index in range(len(blocks) - 2, last - 1, -1):
            block = blocks[index]
            if index > last:
                self.model.read_ahead(blocks[index - 1])
            with self.model.profile.block(block.label, "backward"):
                total = self._block(index, rows, kept)
                self.model.release(block)
                with self.model.profile.span("optimizer"):
                    update(block, total)
                del total
        return result

    def _block(self, index: int, rows: Sequence[Sample], kept: Kept) -> Gradients:
        block = self.model.blocks[index]
        loras = self.adapters.loras(block)
        total: Gradients = {}
        for row, item in enumerate(rows):
            dx, gradients = self.model.backward(
                block,
                self.activations.get(index, row),
                self.activations.get(index + 1, row),
                self._of_row(block, loras, row),
                kept=kept.pop((index, row), None),
                offsets=item.offsets,
            )
            if dx is not None:
                self.activations.put(index, row, dx)
            accumulate(total, gradients)
            del dx, gradients
        return total

    def _of_row(self, block: Block, loras: Loras, row: int) -> Loras:
        return loras if self.dropout is None else self.dropout.of_row(block, loras, row)

    def _forward(self, rows: Sequence[Sample]) -> Kept:
        kept: Kept = {}
        blocks = self.model.blocks
        with self.model.profile.block(blocks[0].label, "forward"):
            for row, item in enumerate(rows):
                self.activations.put(1, row, self.model.embed(item.inputs))
            self.model.release(blocks[0])
        for index, block in enumerate(blocks[1:-1], start=1):
            self.model.read_ahead(blocks[index + 1])
            loras = self.adapters.loras(block)
            with self.model.profile.block(block.label, "forward"):
                if index >= len(blocks) - 1 - self.kept_layers:
                    self._forward_keeping(index, rows, loras, kept)
                else:
                    self._forward_lanes(index, rows, loras)
            self.model.release(block)
        return kept

    def _forward_keeping(
        self, index: int, rows: Sequence[Sample], loras: Loras, kept: Kept
    ) -> None:
        for row, item in enumerate(rows):
            x = self.activations.get(index, row)
            block = self.model.blocks[index]
            given = self._of_row(block, loras, row)
            y, kept[index, row] = self.model.forward_keeping(block, x, given, item.offsets)
            self.activations.put(index + 1, row, y)
            del x, y

    def _forward_lanes(self, index: int, rows: Sequence[Sample], loras: Loras) -> None:
        for first in range(0, len(rows), self.lanes):
            group = range(first, min(first + self.lanes, len(rows)))
            xs = [self.activations.get(index, row) for row in group]
            offsets = [rows[row].offsets for row in group]
            block = self.model.blocks[index]
            given = [self._of_row(block, loras, row) for row in group]
            ys = self.model.forward_lanes(block, xs, given, offsets)
            for row in group:
                self.activations.put(index + 1, row, ys.pop(0))

    def _head(self, rows: Sequence[Sample], tokens: int) -> StepLoss:
        """The losses; the gradients of the head's inputs replace these inputs."""
        head = len(self.model.blocks) - 1
        block = self.model.blocks[head]
        result = StepLoss(0.0, 0, 0)
        with self.model.profile.block(block.label, "forward"):
            for group in _groups(rows, self.model.bucket):
                hs = [
                    self.model.hidden(self.activations.get(head, row), rows[row].scored)
                    for row in group
                ]
                scored = self.model.losses(hs, [rows[row].targets for row in group], True)
                hs.clear()
                for row in group:
                    one = scored.pop(0)
                    loss = float(one.loss.sum().item())  # type: ignore[arg-type]
                    result += StepLoss(loss, 0, len(rows[row].targets))
                    assert one.dh is not None
                    x = self.activations.get(head, row)
                    dx = self.model.head_backward(x, one.dh * (1.0 / tokens), rows[row].scored)
                    self.activations.put(head, row, dx)
                    del x, dx, one
        self.model.release(block)
        return result


def _groups(rows: Sequence[Sample], most: int) -> list[list[int]]:
    """Groups of rows for one pass over the vocabulary, of at most `most` scored positions."""
    groups: list[list[int]] = []
    room = 0
    for index, row in enumerate(rows):
        if not groups or len(row.targets) > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= len(row.targets)
    return groups


@dataclass(frozen=True)
class MeBP:
    """The method `mebp`: exact gradients, and the optimizer's update of each block."""

    models: Models
    adapters: Adapters
    activations: Activations
    optimizer: Optimizer
    lanes: int = 1
    kept_layers: int = 0
    clipping: Clipping | None = None
    seed: int = 0  # of the dropout
    keeps_log: ClassVar[bool] = False

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Sample]]) -> StepResult:
        """See `Method.step`; gradients of several parts are held until the last.

        With clipping they are held in its scratch file, until their norm is known.
        """
        self.optimizer.begin(number, rate)
        tokens = sum(len(row.targets) for part in parts for row in part)
        held: dict[Block, Gradients] = {}

        def hold(block: Block, gradients: Gradients) -> None:
            accumulate(held.setdefault(block, {}), gradients)

        loss = StepLoss(0.0, 0, 0)
        dropout = StepDropout(self.seed, self.adapters.dropout, number)
        for rows in parts:
            model = self.models(max(len(row.inputs) for row in rows))
            pass_ = Backprop(
                model, self.adapters, self.activations, self.lanes, self.kept_layers, dropout
            )
            dropout = replace(dropout, first_row=dropout.first_row + len(rows))
            update: Update = self.optimizer.apply if len(parts) == 1 else hold
            if self.clipping is not None:
                update = self.clipping.store
            loss += pass_.gradients(rows, tokens, update)
        for block, gradients in held.items():
            self.optimizer.apply(block, gradients)
        norm = None if self.clipping is None else self.clipping.apply(self.optimizer)
        return StepResult(loss, sum(map(len, parts)), gradient_norm=norm)

    def settle(self) -> None:
        """Does nothing: each update is applied at once, so none is pending."""

    def write(self, path: Path) -> None:
        self.optimizer.write(path)

    def read(self, path: Path) -> None:
        self.optimizer.read(path)

    def log_header(self) -> str:
        raise AssertionError("nothing is logged: the saves hold all there is")


def demand(config: StepConfig) -> Demand:
    """Needs a checkpoint of every block boundary for each row, and one layer's gradients."""
    return Demand(
        rows=config.batch_size,
        hidden_states=config.batch_size,
        lanes_in_spare_memory=config.batch_size,
        backward=True,
        holds_gradients=config.grad_accumulation > 1 and not config.max_grad_norm,
        moments=len(moments(config.optimizer)),
        stores_gradients=bool(config.max_grad_norm),
        drops_inputs=bool(config.lora_dropout),
    )


def start(config: TrainConfig, begin: Start) -> MeBP:
    """The method at its beginning."""
    shape = begin.activation_shape
    most = config.max_grad_norm
    return MeBP(
        begin.models,
        begin.adapters,
        Activations(begin.scratch, begin.block_count, config.batch_size, shape),
        Optimizer(begin.adapters, config.optimizer, config.weight_decay, begin.scratch),
        begin.plan.lanes,
        begin.plan.kept_layers,
        Clipping(begin.adapters, most, begin.scratch) if most else None,
        config.seed,
    )
