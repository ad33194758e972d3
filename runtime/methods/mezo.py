"""Memory-efficient zeroth-order optimization (MeZO), block by block as in ZO2.

MeZO's Algorithms 1 and 2 are SPSA along noise z, which is drawn again whenever it is needed:

    g = (loss(theta + eps z) - loss(theta - eps z)) / (2 eps)      theta <- theta - rate g z

Both perturbed hidden states visit a block together, so its weights are read and dequantized once
for them. The update of a step is applied to a block when the next step visits it (ZO2, section 5),
or by `settle`: the arithmetic is the same. Perturbed values are computed from theta, never restored
by subtraction. The reference on the whole model is `harness.oracles.reference.MonolithicMeZO`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import mlx.core as mx

from ondevice.config.shared import StepConfig
from ondevice.config.train import TrainConfig
from ondevice.documents import from_json
from ondevice.errors import BundleError, UsageError
from ondevice.files import read_file, write_atomic
from ondevice.operations.program import Block
from runtime.engine.model import Model
from runtime.engine.values import Loras
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.protocol import Models, Sample, Start, StepLoss, StepResult
from runtime.methods.scalar_update import Update, projected_gradient
from runtime.methods.trajectory import Header, digest
from runtime.planner.demand import Demand, lane_choices
from runtime.storage.activations import Activations

PLUS, MINUS = 1.0, -1.0
MOST_UNMOVED = 10  # steps in a row in which no perturbation changes a loss, which end a run
MOST_LANES = 16  # hidden states side by side, where they fit


class Lane(NamedTuple):
    """One hidden state between blocks: a row under one query's perturbation."""

    query: int
    row: int
    sign: float


@dataclass
class MeZO:
    """The method `mezo`; `lanes` hidden states (at least 2) visit a block side by side.

    `activations` holds one slot for each of 2 x queries x rows hidden states.
    """

    models: Models
    adapters: Adapters
    activations: Activations
    noise: Noise
    epsilon: float
    queries: int = 1
    weight_decay: float = 0.0
    lanes: int = 2
    defer: bool = True
    skipped: int = 0  # losses in a row that were not finite
    unmoved: int = 0  # steps in a row in which no perturbation changed a loss
    _pending: Update | None = field(default=None, repr=False)
    keeps_log: ClassVar[bool] = True

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Sample]]) -> StepResult:
        """See `Method.step`; all parts run together, at the bucket of their longest row."""
        rows = [row for part in parts for row in part]
        model = self.models(max(len(row.inputs) for row in rows))
        lanes = [
            Lane(query, row, sign)
            for query in range(self.queries)
            for row in range(len(rows))
            for sign in (PLUS, MINUS)
        ]
        self._embed(model, rows, lanes)
        for index, block in enumerate(model.blocks[1:-1], start=1):
            model.read_ahead(model.blocks[index + 1])
            with model.profile.block(block.label, "forward"):
                self._block(model, block, number, rows, lanes)
        self._pending = None  # every block has been visited
        losses = self._losses(model, rows, lanes)
        return self._learn(number, rate, rows, lanes, losses)

    def _embed(self, model: Model, rows: Sequence[Sample], lanes: Sequence[Lane]) -> None:
        block = model.blocks[0]
        with model.profile.block(block.label, "forward"):
            for row, item in enumerate(rows):
                x = model.embed(item.inputs)
                for slot, lane in enumerate(lanes):
                    if lane.row == row:
                        self.activations.put(0, slot, x)
                del x
            model.release(block)

    def _block(
        self, model: Model, block: Block, number: int, rows: Sequence[Sample], lanes: list[Lane]
    ) -> None:
        self._catch_up(block, model)
        perturbed: dict[tuple[int, float], Loras] = {}
        for first in range(0, len(lanes), self.lanes):
            group = lanes[first : first + self.lanes]
            for done in [key for key in perturbed if key[0] < group[0].query]:
                del perturbed[done]
            for query in sorted({lane.query for lane in group}):
                if (query, PLUS) not in perturbed:
                    with model.profile.span("noise"):
                        self._perturb(perturbed, block, number, query)
            xs = [self.activations.get(0, first + i) for i in range(len(group))]
            loras = [perturbed[lane.query, lane.sign] for lane in group]
            offsets = [rows[lane.row].offsets for lane in group]
            ys = model.forward_lanes(block, xs, loras, offsets)
            for i in range(len(group)):
                self.activations.put(0, first + i, ys.pop(0))
            del loras  # before the next group's are drawn
        model.release(block)

    def _perturb(
        self, perturbed: dict[tuple[int, float], Loras], block: Block, number: int, query: int
    ) -> None:
        """theta + eps z and theta - eps z of the block, for one query."""
        names = self._names(block)
        z = {
            name: self.noise.draw(number, query, name, self.adapters.tensors[name].shape)
            for name in names
        }
        for sign in (PLUS, MINUS):
            step = sign * self.epsilon
            tensors = {name: self.adapters.tensors[name] + z[name] * step for name in names}
            mx.eval(tensors)
            adapters = Adapters(self.adapters.manifest, tensors, self.adapters.dtype)
            perturbed[query, sign] = adapters.loras(block)

    def _names(self, block: Block) -> list[str]:
        return [
            f"{block.tensor(name)}.{suffix}"
            for name in self.adapters.manifest.adapted(block)
            for suffix in ("lora_a", "lora_b")
        ]

    def _losses(self, model: Model, rows: Sequence[Sample], lanes: Sequence[Lane]) -> list[float]:
        """The summed loss of every lane."""
        head = model.blocks[-1]
        found: list[float] = []
        with model.profile.block(head.label, "forward"):
            for first in range(0, len(lanes), self.lanes):
                group = lanes[first : first + self.lanes]
                hs = [
                    model.hidden(self.activations.get(0, first + i), rows[lane.row].scored)
                    for i, lane in enumerate(group)
                ]
                targets = [rows[lane.row].targets for lane in group]
                results = model.losses(hs, targets, gradient=False, predictions=False)
                found += [float(result.loss.sum().item()) for result in results]  # type: ignore[arg-type]
        model.release(head)
        return found

    def _learn(
        self,
        number: int,
        rate: float,
        rows: Sequence[Sample],
        lanes: Sequence[Lane],
        losses: Sequence[float],
    ) -> StepResult:
        tokens = sum(len(row.targets) for row in rows)
        sums = {(query, sign): 0.0 for query in range(self.queries) for sign in (PLUS, MINUS)}
        for lane, loss in zip(lanes, losses, strict=True):
            sums[lane.query, lane.sign] += loss
        mean = StepLoss(sum(sums.values()) / len(sums), 0, tokens)
        if not all(map(math.isfinite, losses)):
            self.skipped += 1
            return StepResult(mean, len(lanes), self.skipped, [rate, None])
        self.skipped = 0
        self._check_moved(sums)
        gradients = tuple(
            projected_gradient(
                sums[query, PLUS] / tokens, sums[query, MINUS] / tokens, self.epsilon
            )
            for query in range(self.queries)
        )
        self._pending = Update(number, rate, gradients, self.weight_decay)
        if not self.defer:
            self.settle()
        return StepResult(mean, len(lanes), 0, [rate, list(gradients)])

    def _check_moved(self, sums: Mapping[tuple[int, float], float]) -> None:
        """Refuse an epsilon that changes no loss, step after step: nothing would be learnt.

        Raises:
            UsageError: this is the last of MOST_UNMOVED such steps.
        """
        pairs = [(sums[query, PLUS], sums[query, MINUS]) for query in range(self.queries)]
        self.unmoved = self.unmoved + 1 if all(a == b != 0 for a, b in pairs) else 0
        if self.unmoved == MOST_UNMOVED:
            raise UsageError(
                f"in {MOST_UNMOVED} steps in a row the losses at +epsilon and -epsilon were equal, "
                f"the last {pairs[0][0]:g} and {pairs[0][1]:g}: --epsilon {self.epsilon:g} is too "
                "small for float32, and nothing is learnt; give a larger one, such as 0.001"
            )

    def _catch_up(self, block: Block, model: Model) -> None:
        """Apply the pending update to one block."""
        if self._pending is not None:
            with model.profile.span("update"):
                self._apply(self._names(block))

    def _apply(self, names: Sequence[str]) -> None:
        assert self._pending is not None
        tensors = self.adapters.tensors
        for name in names:
            tensors[name] = self._pending.apply(self.noise, name, tensors[name])

    def settle(self) -> None:
        """Apply the pending update to all blocks at once."""
        if self._pending is not None:
            self._apply(list(self.adapters.tensors))
            self._pending = None

    def write(self, path: Path) -> None:
        """Write the state besides the adapters: how many losses in a row were not finite."""
        write_atomic(path, json.dumps({"skipped": self.skipped}).encode())

    def read(self, path: Path) -> None:
        """Read what `write` wrote.

        Raises:
            BundleError: the file holds something else.
        """
        try:
            self.skipped = int(from_json(read_file(path))["skipped"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
            raise BundleError(f"{path} is damaged: {problem!r}") from None

    def log_header(self) -> str:
        """The header of the log from which `ondevice replay` rebuilds the run's adapters."""
        manifest, noise = self.adapters.manifest, self.noise
        lora = manifest.lora.to_json()
        weights, initial = manifest.weights_sha256, digest(self.adapters)
        return Header(noise.seed, noise.kind, self.weight_decay, weights, initial, lora).line()


def _hidden_states(config: StepConfig) -> int:
    """Two for each row and query: at theta + eps z and at theta - eps z."""
    return 2 * config.queries * config.batch_size * config.grad_accumulation


def demand(config: StepConfig) -> Demand:
    """Needs a checkpoint for each hidden state, and two perturbed copies of a block's adapters.

    The copies of a query are freed once its hidden states are done.

    Raises:
        UsageError: the configuration asks for gradients, or for dropout.
    """
    if config.max_grad_norm:
        raise UsageError(
            f"--max-grad-norm {config.max_grad_norm:g} limits the norm of gradients, and mezo "
            "computes none: it sees losses only; leave it out, and lower --learning-rate instead"
        )
    if config.lora_dropout:
        raise UsageError(
            f"--lora-dropout {config.lora_dropout:g} is not for mezo: it estimates gradients from "
            "small differences between losses, to which random masks add noise; leave it out, or "
            "give --lora-dropout 0 if the adapter in --adapter was trained with dropout"
        )
    hidden_states = _hidden_states(config)
    return Demand(
        rows=config.batch_size,
        hidden_states=hidden_states,
        slots=1,
        lanes=lane_choices(min(MOST_LANES, hidden_states), fewest=2),
        adapter_copies=2 * min(config.queries, 2 + MOST_LANES // 2),
        scratch_copies=3,  # z, theta and their sum
    )


def start(config: TrainConfig, begin: Start) -> MeZO:
    """The method at its beginning."""
    return MeZO(
        begin.models,
        begin.adapters,
        Activations(begin.scratch, 1, _hidden_states(config), begin.activation_shape),
        Noise(config.seed, config.noise),
        config.epsilon,
        config.queries,
        config.weight_decay,
        begin.plan.lanes,
    )
