"""Zeroth-order training of all parameters, block by block as ZO2: the weights on disk are trained.

theta are all matrices and vectors of the model, in the type in which the run stores them. A step
visits each block once: a tile of its weights is read, the last step's update is applied, the hidden
states are multiplied by it at each of the estimator's points, and the updated tile is written back,
while the next block is read ahead (ZO2, sections 4 and 5; MeZO, Algorithm 1). The reference on the
whole model in memory is `tests.oracles.whole_model_full.MonolithicFullMeZO`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.arrays.stored import Block
from runtime.arrays.values import Loras, Moved
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.methods.full.weights import FullWeights, Perturbation
from runtime.methods.log_header import Header
from runtime.methods.protocol import StepResult
from runtime.methods.zeroth.descent import Update
from runtime.methods.zeroth.estimator import Point
from runtime.methods.zeroth.zeroth_order import Pass, ZerothOrder


@dataclass
class FullZerothOrder(ZerothOrder):
    """A method that sees losses only, and trains the weights themselves; adapters there are none.

    Its state is on the disk after every step: a save is the number of a step whose log is flushed.
    """

    weights: FullWeights = field(kw_only=True)
    _loras: dict[Point, Loras] = field(default_factory=dict, init=False, repr=False)

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Sample]]) -> StepResult:
        """See `Method.step`."""
        assert number == self.weights.done, "a step of other weights"
        self._loras = {point: self._moved(number, point) for point in self.estimator.points}
        result = super().step(number, rate, parts)
        self._loras = {}
        assert result.record is not None
        rate, gradients = result.record
        learned = None
        if gradients is not None:
            learned = Update(number, rate, tuple(gradients), self.weight_decay)
        self.weights.learn(learned)
        return result

    def _moved(self, number: int, point: Point) -> Loras:
        if not point.sign:
            return {}
        by = point.sign * self.epsilon
        return Moved(Perturbation(self.weights, number, point.query, by))

    def _embed(self, going: Pass) -> None:
        model, _, rows, lanes = going
        for slot, lane in enumerate(lanes):
            sample = rows[lane.row]
            x = model.embed(sample.inputs, self._loras[lane.point], sample.offsets)
            self.activations.put(0, slot, x)
            del x
        self._catch_up(model.blocks[0], model)
        self._visited(model.blocks[0], model)

    def _perturbed(self, block: Block, step: int, points: Sequence[Point]) -> dict[Point, Loras]:
        return {point: self._loras[point] for point in points}

    def _catch_up(self, block: Block, model: Model) -> None:
        with model.profile.span("update"):
            self.weights.begin(block)

    def _visited(self, block: Block, model: Model) -> None:
        with model.profile.span("update"):
            self.weights.finish(block)

    def settle(self) -> None:
        """Write all blocks with all updates, and flush them to the disk."""
        self.weights.settle()
        if self.weights.slots is not None:
            self.weights.slots.sync()

    def digest(self) -> str:
        return self.weights.digest()

    def log_header(self) -> str:
        """The header of the log from which `ondevice replay` rebuilds the run's weights."""
        noise, sha256 = self.noise, self.weights.manifest.weights_sha256
        more = {**noise.header(), **self.weights.header()}
        return Header(noise.seed, noise.kind, self.weight_decay, sha256, sha256, more=more).line()
