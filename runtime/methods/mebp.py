"""Memory-efficient backpropagation: Algorithm 1 of the MeBP paper.

Forward block by block, keeping only each block's input, and what memory and files have room for;
then the blocks in reverse, each recomputing the other values of its backward: `Backprop.gradients`
has the algorithm. All rows of a micro-batch visit a block together, so a block's gradients are
complete, applied and freed before the next block's backward begins. With clipping they go to a
scratch file instead, and are applied once their norm is known.

Several workers share out the rows of a step (data parallelism). Each adds up the gradients of its
rows, block by block; a layer's are summed over all workers while the next block's backward runs.
So all apply the same update, which is a single worker's up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import mlx.core as mx

from runtime.arrays.arrays import arrays_for
from runtime.arrays.dropout import Dropout
from runtime.arrays.stored import Block
from runtime.arrays.values import Gradients, Loras, Values, accumulate
from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.engine.visits import Visit, visit, visits
from runtime.methods.adapters import Adapters
from runtime.methods.clipping import Clipping
from runtime.methods.noise import number_of
from runtime.methods.optimizer import Optimizer, moments
from runtime.methods.protocol import ApplyGradients, Models, Start, StepLoss, StepResult
from runtime.methods.shared_rows import Held, Shared, own_rows
from runtime.objectives.next_token import NextToken
from runtime.objectives.objective import Loss, Scored, chunks, grouped, loss_of, score
from runtime.parallel.workers import Workers
from runtime.plan.demand import Demand
from runtime.plan.lower import way_of
from runtime.storage.activations import Activations

Kept = dict[tuple[int, int], tuple[int, Values]]  # by block and row: how it was kept, and values


@dataclass(frozen=True)
class StepDropout:
    """The dropout of step `step` (0-based), for rows that are counted from `first_row`.

    Masks are keyed by (seed, step, row of the step, tensor) and by the token, so they are the same
    in any order of execution, in the recomputed forward pass, and after a run is resumed.
    """

    seed: int = 0
    probability: float = 0.0
    step: int = 0
    first_row: int = 0

    def of_row(self, block: Block, loras: Loras, row: int) -> Loras:
        """The block's adapters, with the dropout of one row."""
        if not self.probability:
            return loras
        return {
            name: replace(lora, dropout=self.of_tensor(block.tensor(name), row))
            for name, lora in loras.items()
        }

    def of_tensor(self, tensor: str, row: int) -> Dropout:
        """The dropout of one matrix's input in one row."""
        key = number_of(self.seed, "dropout", self.step, self.first_row + row, tensor)
        return Dropout(key, self.probability)


@dataclass(frozen=True)
class Backprop:
    """Exact gradients over a model.

    `activations` holds a slot per block for each row; `lanes` rows go through each block together
    in the forward pass. `kept` says how many of the last layers keep values for their backward in
    at least so many ways (`LoweredBlock.keeping`); of the others `stored`, if it is there, holds a
    few values, and they recompute the rest. `dropout` is that of the step.
    """

    model: Model
    adapters: Adapters
    activations: Activations
    lanes: int = 1
    kept: Sequence[int] = ()
    dropout: StepDropout = field(default_factory=StepDropout)
    loss: Loss = field(default_factory=NextToken)
    stored: Activations | None = None

    def gradients(self, rows: Sequence[Sample], divisor: int, apply: ApplyGradients) -> StepLoss:
        """Compute the gradients of sum(loss) / `divisor` over `rows`, and hand them to `apply`.

        Algorithm 1 of the paper, `Backpropagation(x)`, whose checkpoints are our activations:

            for each checkpoint index i in [1, ..., n]
                Load base_weights_i <- LazyLoadAndDecompressWeights(i)
                Compute ckpts_i <- forward_i(lora_weights_i, base_weights_i, ckpts_i-1)
                Mmap ckpts_i and add to ckpts_storage
            for each checkpoint index i in [n, ..., 1]
                Load base_weights_i <- LazyLoadAndDecompressWeights(i)
                Compute (lora_grads_i, ckpts_grads_i) <-
                    backward_i(lora_weights_i, base_weights_i, ckpts_i-1, ckpts_grads_i+1)
                Remove ckpts_i from ckpts_storage
                Update lora_grads <- lora_grads U {lora_grads_i}

        Here the weights are loaded a tile at a time, while their block is visited. The gradient of
        a block's input takes the place of that input. The adapters' gradients are not collected:
        `apply` has a block's as soon as all rows have gone back through it. Those of a tied head's
        adapter, which is the embedding's, wait until the pass has reached that.
        """
        kept: Kept = {}
        embedding, head = self.model.blocks[0], self.model.blocks[-1]
        with visit(self.model, 0):
            loras = self.adapters.loras(embedding)
            for row, sample in enumerate(rows):
                x = self.model.embed(sample.inputs, loras, sample.offsets)
                self.activations.put(1, row, x)
                del x
            del loras
        for layer in visits(self.model):
            self._forward(layer, rows, kept)
        of_head: Gradients = {}
        with visit(self.model, -1) as last:
            loss = self._head(rows, divisor, of_head)
            last.release()
            if self.adapters.manifest.owner(head) == head and of_head:
                self._apply(apply, head, of_head)
        trained = range(self.model.lowered.first_adapted, len(self.model.blocks) - 1)
        for layer in visits(self.model, trained, "backward"):
            if layer.block == embedding:
                total = self._embedding(rows, of_head)
            else:
                total = self._backward(layer, rows, kept)
            layer.release()  # before the optimizer takes memory
            self._apply(apply, layer.block, total)
            del total
        return loss

    def _apply(self, apply: ApplyGradients, block: Block, gradients: Gradients) -> None:
        with self.model.profile.span("optimizer"):
            apply(block, gradients)
        gradients.clear()

    def _forward(self, layer: Visit, rows: Sequence[Sample], kept: Kept) -> None:
        """Store the layer's outputs, and put into `kept` the values for its backward."""
        index, block = layer.index, layer.block
        loras = self.adapters.loras(block)
        way = way_of(len(self.model.blocks) - 1 - index, self.kept)
        lanes = 1 if way else self.lanes
        for first in range(0, len(rows), lanes):
            group = range(first, min(first + lanes, len(rows)))
            xs = [self.activations.get(index, row) for row in group]
            given = [self.dropout.of_row(block, loras, row) for row in group]
            offsets = [rows[row].offsets for row in group]
            if not way and self.stored is None:
                ys = self.model.forward_lanes(block, xs, given, offsets)
            else:
                ys, values = self.model.forward_keeping(block, xs, given, way, offsets)
                for row in group:
                    self._keep(index, row, way, values.pop(0), kept)
            for row in group:
                self.activations.put(index + 1, row, ys.pop(0))

    def _keep(self, index: int, row: int, way: int, values: Values, kept: Kept) -> None:
        """Keep a layer's values of a row in memory or, in the first way, in their file."""
        if way or self.stored is None:
            kept[index, row] = way, values
            return
        for slot, name in self._slots(index):
            self.stored.put(slot, row, values.pop(name))

    def _kept(self, index: int, row: int, kept: Kept) -> tuple[int, Values] | None:
        """What a layer has kept of a row, in memory or in its file, and how."""
        if self.stored is None or (index, row) in kept:
            return kept.pop((index, row), None)
        return 0, {name: self.stored.get(slot, row) for slot, name in self._slots(index)}

    def _slots(self, index: int) -> list[tuple[int, str]]:
        """The places in its file of a layer's few values, and their names."""
        lowered = self.model.lowered
        names = sorted(lowered.blocks[index].keeping[0].values)
        return list(enumerate(names, start=(index - 1) * lowered.stored_values))

    def _head(self, rows: Sequence[Sample], divisor: int, gradients: Gradients) -> StepLoss:
        """The losses; the gradients of the head's inputs take the place of these inputs.

        Those of the head's adapter are added to `gradients`.
        """
        model, head = self.model, len(self.model.blocks) - 1
        goes_on = model.lowered.first_adapted < head
        loras = self.adapters.loras(model.blocks[-1])
        result = StepLoss(0.0, 0, 0)

        def positions(group: Sequence[int]) -> int:
            return sum(len(rows[row].targets) for row in group)

        groups = grouped(range(len(rows)), self.loss.together)
        for chunk in chunks(groups, model.bucket, positions):
            numbers = [row for group in chunk for row in group]
            samples = [rows[row] for row in numbers]
            hs = [
                model.hidden(self.activations.get(head, row), rows[row].scored) for row in numbers
            ]
            predicts, of_rows = self.loss.predicts, [loras] * len(hs)
            scored = score(
                model, samples, hs, gradient=goes_on, predictions=predicts, loras=of_rows
            )
            hs.clear()
            loss, slopes = self._slopes(scored, divisor)
            result += loss
            if loras:
                model.head_gradients(
                    [sample.h for sample in scored],
                    [sample.sample.targets for sample in scored],
                    [mx.ones((len(s.h), 1)) * by for s, by in zip(scored, slopes, strict=True)],
                    [sample.head for sample in scored],
                    loras,
                    gradients,
                )
            dhs = [sample.gradient for sample in scored] if goes_on else []
            scored.clear()  # hidden states, before the block's backward takes memory
            for row in numbers if goes_on else ():
                dx = model.head_backward(
                    self.activations.get(head, row), dhs.pop(0) * slopes.pop(0), rows[row].scored
                )
                self.activations.put(head, row, dx)
                del dx
        if self.adapters.manifest.owner(model.blocks[-1]) != model.blocks[-1]:
            for name, (da, db) in gradients.items():
                gradients[name] = db.T, da.T
        return result

    def _slopes(
        self, scored: Sequence[Scored], divisor: int
    ) -> tuple[StepLoss, list[float | mx.array]]:
        """The loss of scored rows, and its slope in the cross entropy of each."""
        result = StepLoss(0.0, 0, 0)
        slopes: list[float | mx.array] = []
        for group in grouped(scored, self.loss.together):
            entropy = sum(sample.cross_entropy for sample in group)
            count = sum(len(sample.sample.targets) for sample in group)
            result += StepLoss(entropy, 0, count, self.loss.value(group))
            slopes += [slope * (1.0 / divisor) for slope in self.loss.slopes(group)]
        return result, slopes

    def _embedding(self, rows: Sequence[Sample], total: Gradients) -> Gradients:
        """The embedding's gradients over all rows, added to those of a tied head."""
        loras = self.adapters.loras(self.model.blocks[0])
        for row, sample in enumerate(rows):
            dy = self.activations.get(1, row)
            self.model.embed_backward(sample.inputs, dy, loras, total, sample.offsets)
            del dy
        return total

    def _backward(self, layer: Visit, rows: Sequence[Sample], kept: Kept) -> Gradients:
        """The layer's gradients over all rows; those of its inputs take the place of these."""
        index, block = layer.index, layer.block
        loras = self.adapters.loras(block)
        total: Gradients = {}
        for row, sample in enumerate(rows):
            dx, gradients = self.model.backward(
                block,
                self.activations.get(index, row),
                self.activations.get(index + 1, row),
                self.dropout.of_row(block, loras, row),
                kept=self._kept(index, row, kept),
                offsets=sample.offsets,
            )
            if dx is not None:
                self.activations.put(index, row, dx)
            accumulate(total, gradients, self.model.arrays)
            del dx, gradients
            self.model.arrays.finish(total)
        return total


@dataclass(frozen=True)
class MeBP:
    """The method `mebp`: exact gradients, and the optimizer's update of each block."""

    models: Models
    adapters: Adapters
    activations: Activations
    optimizer: Optimizer
    lanes: int = 1
    kept: Sequence[int] = ()
    clipping: Clipping | None = None
    seed: int = 0  # of the dropout
    loss: Loss = field(default_factory=NextToken)
    workers: Workers = field(default_factory=Workers)
    stored: Activations | None = None
    keeps_log: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Sample]]) -> StepResult:
        """See `Method.step`; gradients of several parts are held until the last.

        With clipping they are held in its scratch file, until their norm is known.
        """
        self.optimizer.begin(number, rate)
        samples = [row for part in parts for row in part]
        divisor = self.loss.count(samples)
        arrays = arrays_for(self.adapters.manifest.device, one_evaluation=True)
        held = Held(arrays) if self.clipping is None else self.clipping
        update = self.optimizer.apply if self.clipping is None else self.clipping.store
        shared = Shared(self.workers.exchange, update, self.adapters.manifest.layers)

        def finish(block: Block, gradients: Gradients) -> None:
            held.add_to(block, gradients)
            shared.apply(block, gradients)

        loss = StepLoss(0.0, 0, 0)
        dropout = StepDropout(self.seed, self.adapters.dropout, number)
        own = own_rows(self.workers, parts, self.loss.together)
        for index, (first_row, rows) in enumerate(own, start=1):
            self.workers.passes += len(rows)
            pass_ = Backprop(
                self.models(max(len(row.inputs) for row in rows)),
                self.adapters,
                self.activations,
                self.lanes,
                self.kept,
                replace(dropout, first_row=first_row),
                self.loss,
                self.stored,
            )
            loss += pass_.gradients(rows, divisor, finish if index == len(own) else held.store)
        shared.finish()
        norm = None if self.clipping is None else self.clipping.apply(self.optimizer)
        loss = self._of_all(loss, sum(len(row.targets) for row in samples))
        shown = self.loss.shown(loss.objective_sum / divisor)
        return StepResult(loss, len(samples), gradient_norm=norm, shown=shown)

    def _of_all(self, loss: StepLoss, scored_tokens: int) -> StepLoss:
        """The loss of all workers' rows, added in rank order."""
        exchange = self.workers.exchange
        sums = [loss.loss_sum, loss.objective_sum]
        gathered = exchange.gather(sums, [len(sums)] * exchange.size)
        return StepLoss(sum(gathered[::2]), 0, scored_tokens, sum(gathered[1::2]))

    def settle(self) -> None:
        """Does nothing: each update is applied at once, so none is pending."""

    def digest(self) -> str:
        return self.adapters.digest()

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
        shares=True,
    )


def start(config: TrainConfig, begin: Start) -> MeBP:
    """The method at its beginning.

    Raises:
        UsageError: workers are to share anything but rows, or there are more workers than rows.
    """
    loss, workers = loss_of(config.objective, begin.rows, config.method), begin.workers
    if workers.perturb > 1:
        raise UsageError(
            f"perturb={workers.perturb}: {config.method} runs each row forward once, so its "
            f"workers can share rows only; give data={workers.exchange.size}"
        )
    parts = [range(config.batch_size)] * config.grad_accumulation
    groups = config.grad_accumulation * len(grouped(parts[0], loss.together))
    workers.check(groups, 1, loss.together)
    most_rows = config.batch_size  # of a worker that has become the fastest
    most, stored = config.max_grad_norm, begin.plan.stored_values
    shape = begin.activation_shape
    return MeBP(
        begin.models,
        begin.adapters,
        Activations(begin.scratch, len(begin.adapters.manifest.blocks), most_rows, shape),
        Optimizer(begin.adapters, config.optimizer, config.weight_decay, begin.scratch),
        begin.plan.lanes,
        begin.plan.kept,
        Clipping(begin.adapters, most, begin.scratch) if most else None,
        config.seed,
        loss,
        workers,
        Activations(begin.scratch, stored, most_rows, shape, "mlp-products") if stored else None,
    )
