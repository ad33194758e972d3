"""Memory-efficient zeroth-order optimization, block by block: MeZO's Algorithms 1 and 2 as ZO2.

SPSA along noise z that is drawn again whenever it is needed:

    g = (loss(theta + eps z) - loss(theta - eps z)) / (2 eps)      theta <- theta - rate g z

Both perturbed forwards travel side by side, so a block's weights are read and unpacked once for
them. The update of a step is applied to a block when the next step visits it (ZO2, section 5), or
by `settle`: the arithmetic is the same. Perturbed values are computed from theta, never restored by
subtraction. The monolithic oracle is `harness.oracles.reference.MonolithicMeZO`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ondevice.bundle.manifest import Block
from ondevice.errors import BundleError
from ondevice.files import write_atomic
from runtime.engine.executor import Loras
from runtime.engine.program import Program
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.protocol import Programs, Row, StepLoss, StepResult
from runtime.storage.activations import Activations

PLUS, MINUS = 1.0, -1.0


@dataclass(frozen=True)
class Update:
    """One step's update: theta <- theta - rate (mean over queries of g z + weight_decay theta)."""

    step: int
    rate: float
    gradients: tuple[float, ...]  # projected, one per query
    weight_decay: float

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        """The tensor after the update, evaluated."""
        total = value * self.weight_decay
        for query, gradient in enumerate(self.gradients):
            z = noise.draw(self.step, query, tensor, value.shape)
            total = total + z * (gradient / len(self.gradients))
        value = value - total * self.rate
        mx.eval(value)
        return value


def projected_gradient(plus: float, minus: float, epsilon: float) -> float:
    """SPSA's estimate along z from the mean losses at theta + eps z and theta - eps z."""
    return (plus - minus) / (2 * epsilon)


class Lane(NamedTuple):
    """One hidden state on its way: a row under one query's perturbation."""

    query: int
    row: int
    sign: float


@dataclass
class MeZO:
    """The method `mezo`; `lanes` hidden states (at least 2) visit a block side by side.

    `activations` holds one slot for each of 2 x queries x rows hidden states.
    """

    programs: Programs
    adapters: Adapters
    activations: Activations
    noise: Noise
    epsilon: float
    queries: int = 1
    weight_decay: float = 0.0
    lanes: int = 2
    defer: bool = True
    skipped: int = 0  # losses in a row that were not finite
    _pending: Update | None = field(default=None, repr=False)

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Row]]) -> StepResult:
        """See `Method.step`; all parts travel together, at the bucket of their longest row."""
        rows = [row for part in parts for row in part]
        program = self.programs(max(len(row.inputs) for row in rows))
        lanes = [
            Lane(query, row, sign)
            for query in range(self.queries)
            for row in range(len(rows))
            for sign in (PLUS, MINUS)
        ]
        self._embed(program, rows, lanes)
        for index, block in enumerate(program.blocks[1:-1], start=1):
            program.read_ahead(program.blocks[index + 1])
            with program.profile.block(block.name, "forward"):
                self._block(program, block, number, lanes)
        self._pending = None  # every block has been visited
        losses = self._losses(program, rows, lanes)
        return self._learn(number, rate, rows, lanes, losses)

    def _embed(self, program: Program, rows: Sequence[Row], lanes: Sequence[Lane]) -> None:
        block = program.blocks[0]
        with program.profile.block(block.name or block.type, "forward"):
            for row, item in enumerate(rows):
                x = program.embed(item.inputs)
                for slot, lane in enumerate(lanes):
                    if lane.row == row:
                        self.activations.put(0, slot, x)
                del x
            program.release(block)

    def _block(self, program: Program, block: Block, number: int, lanes: list[Lane]) -> None:
        self._catch_up(block, program)
        perturbed: dict[tuple[int, float], Loras] = {}
        for first in range(0, len(lanes), self.lanes):
            group = lanes[first : first + self.lanes]
            for done in [key for key in perturbed if key[0] < group[0].query]:
                del perturbed[done]
            for query in sorted({lane.query for lane in group}):
                if (query, PLUS) not in perturbed:
                    with program.profile.span("noise"):
                        self._perturb(perturbed, block, number, query)
            xs = [self.activations.get(0, first + i) for i in range(len(group))]
            loras = [perturbed[lane.query, lane.sign] for lane in group]
            ys = program.forward_lanes(block, xs, loras)
            for i in range(len(group)):
                self.activations.put(0, first + i, ys.pop(0))
            del loras  # before the next group's are drawn
        program.release(block)

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

    def _losses(self, program: Program, rows: Sequence[Row], lanes: Sequence[Lane]) -> list[float]:
        """The summed loss of every lane."""
        head = program.blocks[-1]
        found: list[float] = []
        with program.profile.block(head.name or head.type, "forward"):
            for first in range(0, len(lanes), self.lanes):
                group = lanes[first : first + self.lanes]
                hs = [
                    program.hidden(self.activations.get(0, first + i), rows[lane.row].scored)
                    for i, lane in enumerate(group)
                ]
                targets = [rows[lane.row].targets for lane in group]
                results = program.losses(hs, targets, gradient=False, predictions=False)
                found += [float(result.loss.sum().item()) for result in results]  # type: ignore[arg-type]
        program.release(head)
        return found

    def _learn(
        self,
        number: int,
        rate: float,
        rows: Sequence[Row],
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

    def _catch_up(self, block: Block, program: Program) -> None:
        """Apply the pending update to one block."""
        if self._pending is not None:
            with program.profile.span("update"):
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
        """The state beside the settled adapters: how many losses in a row were not finite."""
        write_atomic(path, json.dumps({"skipped": self.skipped}).encode())

    def read(self, path: Path) -> None:
        """Read what `write` wrote.

        Raises:
            BundleError: it is not that.
        """
        try:
            self.skipped = int(json.loads(path.read_bytes())["skipped"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
            raise BundleError(f"{path} is damaged: {problem!r}") from None
