"""Training by forward passes only, block by block as in ZO2: the base of all such methods.

A step evaluates its batch at several points near theta, along directions z that are drawn again
whenever they are needed (`runtime.methods.noise`). An `Estimator` chooses the points, and
turns their losses into gradients; MeZO, the plainest, is in `runtime.methods.zeroth.mezo`.

All hidden states visit a block together, so its weights are read and dequantized once for them.
The update of a step is applied to a block when the next step visits it (ZO2, section 5), or by
`settle`: the arithmetic is the same. Perturbed values are computed from theta, never restored by
subtraction. The references on whole adapters are in `tests.oracles`.

Several workers share out a step (DistZO2): by the points (perturbation parallelism), by the rows
(data parallelism), or both. Each runs its rows at its points, and they exchange a float64 number
for each hidden state, and for each group of rows at each point. No hidden state depends on those
beside it, all rows are padded to one bucket, and every worker adds the numbers in the order of the
rows; so any such grid makes the update of a single worker, bit for bit. So do workers that come
and go (`runtime.parallel.fleet`), which `follow` the log and compute a `part` of a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import mlx.core as mx

from runtime.arrays.stored import Block
from runtime.arrays.values import Loras
from runtime.core.documents import from_json
from runtime.core.errors import BundleError, DivergedError, UsageError
from runtime.core.files import flush, require_file, storage_errors
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.engine.visits import visit, visits
from runtime.methods.adapters import Adapters
from runtime.methods.log_header import Header
from runtime.methods.noise import Noise
from runtime.methods.protocol import Models, StepLoss, StepResult
from runtime.methods.zeroth.descent import Descent, Measured, Probe, Sgd, Update
from runtime.methods.zeroth.estimator import MINUS, PLUS, Estimator, Lane, Losses, Point, by_query
from runtime.methods.zeroth.shared_points import Numbers, Place, of_fleet, of_grid
from runtime.objectives.next_token import NextToken
from runtime.objectives.objective import Loss, Objective, chunks, grouped, score
from runtime.parallel.workers import Workers
from runtime.storage.activations import Activations

LOST = 1.5  # times the loss of guessing: a model whose loss is above it has diverged
MOST_UNMOVED = 10  # steps in a row in which no perturbation changes a loss, which end a run


class Pass(NamedTuple):
    """Rows of a step at some points, on their way through a model."""

    model: Model
    step: int
    rows: Sequence[Sample]
    lanes: Sequence[Lane]


@dataclass
class ZerothOrder:
    """A method that sees losses only; `lanes` hidden states visit a block side by side.

    `activations` holds a slot for each row at each of the estimator's points, or for those that are
    this worker's.
    """

    models: Models
    adapters: Adapters
    activations: Activations
    noise: Noise
    epsilon: float
    estimator: Estimator
    weight_decay: float = 0.0
    descent: Descent = field(default_factory=Sgd)
    lanes: int = 2
    objective: Objective = field(default_factory=NextToken)
    workers: Workers = field(default_factory=Workers)
    skipped: int = 0  # losses in a row that were not finite
    unmoved: int = 0  # steps in a row in which no perturbation changed a loss
    whole: bool = True  # until the descent measures something in the step
    _pending: bool = field(default=False, repr=False)  # the latest update, in some blocks
    _caught_up: set[str] = field(default_factory=set, repr=False)  # tensors that have it already
    _only: Mapping[int, Block] = field(default_factory=dict, repr=False)  # moved by these queries
    keeps_log: ClassVar[bool] = True

    def step(self, number: int, rate: float, parts: Sequence[Sequence[Sample]]) -> StepResult:
        """See `Method.step`; all parts run together, at the bucket of their longest row."""
        going = self._pass(number, parts)
        measured = self._measured(going)
        losses, means = self._forward(going)
        return self._learn(going, rate, losses, means, measured)

    def _pass(self, number: int, parts: Sequence[Sequence[Sample]]) -> Pass:
        """All rows of a step at all points."""
        rows = [row for part in parts for row in part]
        model = self.models(max(len(row.inputs) for row in rows))
        return Pass(model, number, rows, self.estimator.lanes(len(rows)))

    def _forward(self, going: Pass) -> tuple[list[float], dict[Point, float]]:
        """The summed cross entropy of every lane, and the objective's mean at each point."""
        points = list(dict.fromkeys(lane.point for lane in going.lanes))
        groups = grouped(going.rows, self.objective.together)
        lengths = [len(group) + 1 for group in groups]

        compute, fleet = partial(self._computed, going), self.workers.fleet
        if fleet is None or self._only:
            numbers = of_grid(self.workers, points, lengths, compute)
        else:
            places = [*self._groups(going.lanes)]
            numbers = of_fleet(fleet, going.step, places, lengths, compute)
        count = sum(map(self.objective.count, groups))
        means: dict[Point, float] = {}
        for point in points:
            total = 0.0  # `sum` would round otherwise
            for group in range(len(groups)):
                total += numbers[Place(point, group)][-1]
            means[point] = total / count
        ordered = [loss for place in self._groups(going.lanes) for loss in numbers[place][:-1]]
        return ordered, means

    def _computed(self, going: Pass, places: Sequence[Place]) -> Numbers:
        """The numbers at some places; every block is visited, so all get the pending update."""
        mine = set(places)
        own = [lane for lane in going.lanes if self._place(lane) in mine]
        if not own:
            self.settle()
            return {}
        self.workers.passes += len(own)
        going = going._replace(lanes=own)
        with visit(going.model, 0):
            self._embed(going)
        for layer in visits(going.model):
            self._block(going, layer.block)
        with visit(going.model, -1):
            numbers = self._losses(going)
        self._pending = False
        self._caught_up.clear()
        return numbers

    def part(self, number: int, parts: Sequence[Sequence[Sample]], items: range) -> list[float]:
        """Some of the numbers of a step whose other ones other workers compute.

        `items` are places in the order of `estimator.lanes`; `follow` has taken all earlier steps.
        """
        going = self._pass(number, parts)
        self._measured(going)
        places = [*self._groups(going.lanes)][items.start : items.stop]
        numbers = self._computed(going, places)
        return [value for place in places for value in numbers[place]]

    def follow(self, update: Update | None) -> None:
        """Apply the update of a step that others have taken; None if it was skipped."""
        if update is not None:
            self.descent.remember(update)
            self._pending = True
            self.settle()

    def _measured(self, going: Pass) -> Measured:
        """The descent's measurements on this step's batch, before its directions are drawn."""
        self.whole = not self.descent.due(going.step)
        if self.whole:
            return Measured()
        self.settle()

        def alone(moved: Mapping[int, Block]) -> tuple[Losses, Measured]:
            lanes = [
                Lane(Point(query, sign), row)
                for query in moved
                for row in range(len(going.rows))
                for sign in (PLUS, MINUS)
            ]
            self._only = moved
            losses, means = self._forward(going._replace(lanes=lanes))
            self._only = {}
            return means, Measured((), len(lanes), all(map(math.isfinite, losses)))

        together = max(1, len(self.estimator.points) // 2)
        queries = len(by_query(self.estimator.points))
        return self.descent.measure(
            Probe(self.adapters.tensors, self.epsilon, queries, together, alone)
        )

    def _embed(self, going: Pass) -> None:
        """Store the first hidden states; without an adapter those of a row are all the same."""
        model, _, rows, lanes = going
        block, perturbed = model.blocks[0], dict[Point, Loras]()
        if not self.adapters.manifest.adapted(block):
            for row in sorted({lane.row for lane in lanes}):
                x = model.embed(rows[row].inputs, offsets=rows[row].offsets)
                for slot, lane in enumerate(lanes):
                    if lane.row == row:
                        self.activations.put(0, slot, x)
                del x
            return
        self._catch_up(block, model)
        for slot, lane in enumerate(lanes):
            (loras,) = self._at_points(perturbed, going, block, [lane])
            sample = rows[lane.row]
            self.activations.put(0, slot, model.embed(sample.inputs, loras, sample.offsets))
            del loras

    def _block(self, going: Pass, block: Block) -> None:
        model, _, rows, lanes = going
        self._catch_up(block, model)
        perturbed: dict[Point, Loras] = {}
        for first in range(0, len(lanes), self.lanes):
            group = lanes[first : first + self.lanes]
            loras = self._at_points(perturbed, going, block, group)
            xs = [self.activations.get(0, first + i) for i in range(len(group))]
            offsets = [rows[lane.row].offsets for lane in group]
            ys = model.forward_lanes(block, xs, loras, offsets)
            for i in range(len(group)):
                self.activations.put(0, first + i, ys.pop(0))
            del loras  # before the next group's are drawn
            if first == 0:
                self._visited(block, model)

    def _at_points(
        self,
        perturbed: dict[Point, Loras],
        going: Pass,
        block: Block,
        group: Sequence[Lane],
    ) -> list[Loras]:
        """The block's adapters of a group of the lanes, by way of those `perturbed` so far.

        There those of earlier queries are freed, and those at all points of a new one are added.
        """
        for done in [point for point in perturbed if point.query < group[0].point.query]:
            del perturbed[done]
        held = {point.query for point in perturbed}
        for query in sorted({lane.point.query for lane in group} - held):
            points = sorted({lane.point for lane in going.lanes if lane.point.query == query})
            with going.model.profile.span("noise"):
                perturbed |= self._perturbed(block, going.step, points)
        return [perturbed[lane.point] for lane in group]

    def _perturbed(self, block: Block, step: int, points: Sequence[Point]) -> dict[Point, Loras]:
        """The block's adapters at all points of one query."""
        names = self._names(block)
        theta = {name: self.adapters.tensors[name] for name in names}  # each read copies it
        query, owner = points[0].query, self.adapters.manifest.owner(block)
        moves = self._only.get(query, owner) == owner
        turned = (lambda _, z: z) if query in self._only else self.descent.direction
        z = {
            name: turned(name, self.noise.draw(step, query, name, theta[name].shape))
            for name in names
            if moves and self.estimator.trains(name)
        }
        perturbed: dict[Point, Loras] = {}
        for point in points:
            by = point.sign * self.epsilon
            tensors = {
                name: theta[name] + z[name] * by if by and name in z else theta[name]
                for name in names
            }
            mx.eval(tensors)
            perturbed[point] = Adapters(self.adapters.manifest, tensors).loras(block)
        return perturbed

    def _names(self, block: Block) -> list[str]:
        """The tensors with which a block runs, some of which another one may own."""
        return list(self.adapters.manifest.adapter_shapes(self.adapters.manifest.owner(block)))

    def _place(self, lane: Lane) -> Place:
        return Place(lane.point, lane.row // self.objective.together)

    def _groups(self, lanes: Sequence[Lane]) -> dict[Place, list[int]]:
        """The slots of lanes that the objective sees together."""
        groups: dict[Place, list[int]] = {}
        for slot, lane in enumerate(lanes):
            groups.setdefault(self._place(lane), []).append(slot)
        return groups

    def _losses(self, going: Pass) -> Numbers:
        """For each group the summed cross entropy of each row, and the group's summand."""
        model, _, rows, lanes = going
        head, objective = model.blocks[-1], self.objective
        numbers: Numbers = {}
        perturbed: dict[Point, Loras] = {}
        self._catch_up(head, model)
        groups = [*self._groups(lanes).values()]
        for chunk in chunks(groups, self.lanes, len):
            slots = [slot for group in chunk for slot in group]
            chosen = [lanes[slot] for slot in slots]
            loras = self._at_points(perturbed, going, head, chosen)
            samples = [rows[lanes[slot].row] for slot in slots]
            hs = [
                model.hidden(self.activations.get(0, slot), sample.scored, own)
                for slot, sample, own in zip(slots, samples, loras, strict=True)
            ]
            scored = score(model, samples, hs, predictions=objective.predicts, loras=loras)
            hs.clear()  # as `scored` below: the next chunk comes with its own
            if not numbers:
                self._visited(head, model)
            for group in chunk:
                own = [scored.pop(0) for _ in group]
                entropies = (row.cross_entropy for row in own)
                place = self._place(lanes[group[0]])
                numbers[place] = [*entropies, objective.value(own)]
                del own
        return numbers

    def _learn(
        self,
        going: Pass,
        rate: float,
        losses: Sequence[float],
        means: Losses,
        measured: Measured,
    ) -> StepResult:
        rows, lanes = going.rows, going.lanes
        tokens = sum(len(row.targets) for row in rows)
        mean = StepLoss(sum(losses) / (len(lanes) // len(rows)), 0, tokens)
        passes = len(lanes) + measured.forward_passes
        if not (measured.finite and all(map(math.isfinite, losses))):
            self.skipped += 1
            return StepResult(mean, passes, self.skipped, [rate, None])
        self.skipped = 0
        shown = self.objective.shown(sum(means.values()) / len(means))
        is_share = not isinstance(self.objective, Loss)  # which often stays as it is
        if not is_share:
            self._check_moved(means)
        gradients = self.estimator.gradients(means, self.epsilon)
        if is_share:
            shown["learned"] = any(gradients)
        extras = (*measured.extras, *self.estimator.extras(means, self.epsilon))
        update = Update(going.step, rate, gradients, self.weight_decay, extras)
        self._pending = True
        self.descent.remember(update)
        return StepResult(mean, passes, 0, update.record, shown=shown)

    def _check_moved(self, losses: Losses) -> None:
        """End a run in which no perturbation changes a loss, step after step.

        Either they are too small, or the model is lost, and its loss the same all around.

        Raises:
            DivergedError, UsageError: this is the last of MOST_UNMOVED such steps.
        """
        pairs = [(losses[a], losses[b]) for a, b in self.estimator.compared]
        unmoved = bool(pairs) and all(a == b != 0 for a, b in pairs)
        self.unmoved = self.unmoved + 1 if unmoved else 0
        if self.unmoved < MOST_UNMOVED:
            return
        equal = (
            f"in {MOST_UNMOVED} steps in a row the losses of differently perturbed adapters were "
            f"equal, the last {pairs[0][0]:g} and {pairs[0][1]:g}"
        )
        guessing = math.log(self.adapters.manifest.vocab_size)
        if pairs[0][0] > LOST * guessing:
            raise DivergedError(
                f"{equal}, where a model that only guesses has {guessing:.3g}: it has diverged; "
                "lower --learning-rate"
            )
        raise UsageError(
            f"{equal}: --epsilon {self.epsilon:g} is too small for float32, and nothing is learnt; "
            "give a larger one, such as 0.001"
        )

    def _visited(self, block: Block, model: Model) -> None:
        """The first hidden states have left a block: its update is complete."""

    def _catch_up(self, block: Block, model: Model) -> None:
        """Apply the pending update to one block."""
        if self._pending:
            with model.profile.span("update"):
                self._update(block)

    def _update(self, block: Block) -> None:
        """Apply the pending update to the tensors of one block that do not have it."""
        names = [name for name in self._names(block) if name not in self._caught_up]
        tensors = self.adapters.tensors
        with mx.stream(mx.cpu):  # where the noise is drawn
            if own := {name: tensors[name] for name in names if self.estimator.trains(name)}:
                tensors.update(self.descent.apply(self.noise, own))
        self._caught_up.update(names)

    def settle(self) -> None:
        """Apply the pending update at once to all blocks that a pass has not come to."""
        if self._pending:
            for block in self.adapters.manifest.blocks:
                self._update(block)
            self._pending = False
            self._caught_up.clear()

    def digest(self) -> str:
        self.settle()
        return self.adapters.digest()

    def write(self, path: Path) -> None:
        """Write the state besides the adapters: of the parts, and losses that were not finite."""
        facts = {"skipped": self.skipped, **self.estimator.state(), **self.descent.state()}
        with storage_errors(path), path.open("wb") as file:
            file.write(json.dumps(facts).encode())
            self.descent.write(file)
            file.flush()
            flush(file.fileno())

    def read(self, path: Path) -> None:
        """Read the state that `write` wrote.

        Raises:
            BundleError: the file holds something else.
        """
        try:
            require_file(path)
            with path.open("rb") as file:
                facts = from_json(file.readline())
                self.skipped = int(facts["skipped"])
                self.estimator.restore(facts)
                self.descent.restore(facts)
                self.descent.read(file)
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
            raise BundleError(f"{path} is damaged: {problem!r}") from None

    def log_header(self) -> str:
        """The header of the log from which `ondevice replay` rebuilds the run's adapters."""
        manifest, noise = self.adapters.manifest, self.noise
        lora = manifest.lora.to_json()
        weights, initial = manifest.weights_sha256, self.adapters.digest()
        more = {**self.descent.header(), **noise.header(), **self.estimator.header()}
        return Header(
            noise.seed, noise.kind, self.weight_decay, weights, initial, lora, more=more
        ).line()
