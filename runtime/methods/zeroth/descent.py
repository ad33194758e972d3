"""How estimates of the gradient become steps: plain SGD, or averages over the latest estimates.

With G_s the estimate of step s (the mean of g z over its directions), and w the weight decay:

    sgd        theta <- theta - rate (G_t + w theta)
    momentum   theta <- theta - rate (m + w theta)
    adam       theta <- theta - rate (m / (sqrt(v) + 1e-8) + w theta)

    m = sum_s beta1^(t-s) G_s / sum_s beta1^(t-s)           beta1 = 0.9
    v = sum_s beta2^(t-s) G_s^2 / sum_s beta2^(t-s)         beta2 = 0.999

MeZO's section 2.2 and appendix B.2 draw each G_s again from its seed and its numbers g, so no
moment is ever stored. The sums go over the latest `window` estimates, since each is drawn again in
every step (AdaMeZO, arXiv 2605.00650, cuts them off likewise). Until there are more than `window`
estimates, m and v are Adam's moments with their bias correction: the weights in the denominators
sum to (1 - beta^t) / (1 - beta). A step that was skipped has no estimate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar, NamedTuple

import mlx.core as mx

from runtime.arrays.stored import Block
from runtime.bundle.manifest import Manifest
from runtime.config.zeroth_order import MOST_WINDOW
from runtime.methods.log_header import Part
from runtime.methods.noise import Noise
from runtime.methods.zeroth.estimator import Losses

BETA1, BETA2, ZETA = 0.9, 0.999, 1e-8

Tensors = Mapping[str, mx.array]  # by full name


@dataclass(frozen=True)
class Update:
    """One step's update: theta <- theta - rate (mean over queries of g z + weight_decay theta).

    It is a few scalars (MeZO, section 2.1: storage-efficient zeroth-order optimization): the noise
    is drawn again, never stored.
    """

    step: int
    rate: float
    gradients: tuple[float, ...]  # projected, one per query
    weight_decay: float
    extras: tuple[float, ...] = ()  # the descent defines them

    @property
    def record(self) -> list[Any]:
        """Its line in the trajectory log."""
        extras = [list(self.extras)] if self.extras else []
        return [self.rate, list(self.gradients), *extras]

    def apply(
        self, noise: Noise, tensors: Tensors, scales: Mapping[str, float] | None = None
    ) -> dict[str, mx.array]:
        """Tensors after the update, evaluated; `scales` multiply the z of each."""
        totals = self._added(
            noise, {name: value * self.weight_decay for name, value in tensors.items()}, scales
        )
        moved = {name: value - totals.pop(name) * self.rate for name, value in tensors.items()}
        mx.eval(moved)
        return moved

    def estimates(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        """The estimates of the tensors' gradients: the means over the queries of g z."""
        return self._added(noise, {name: mx.zeros(x.shape) for name, x in tensors.items()})

    def moved(self, tensors: Tensors, steps: Tensors) -> dict[str, mx.array]:
        """Tensors after steps that come from estimates, and their weight decay, evaluated."""
        moved = {
            name: value - (steps[name] + value * self.weight_decay) * self.rate
            for name, value in tensors.items()
        }
        mx.eval(moved)
        return moved

    def _added(
        self,
        noise: Noise,
        totals: dict[str, mx.array],
        scales: Mapping[str, float] | None = None,
    ) -> dict[str, mx.array]:
        """The totals and the estimates; the last query is left to evaluate."""

        def z(query: int, name: str, shape: tuple[int, ...]) -> mx.array:
            drawn = noise.draw(self.step, query, name, shape)
            return drawn if scales is None else drawn * scales[name]

        for query, gradient in enumerate(self.gradients):
            if query:
                mx.eval(totals)  # so that no more than one direction is in memory
            totals = {
                name: total + z(query, name, total.shape) * (gradient / len(self.gradients))
                for name, total in totals.items()
            }
        return totals


class Measured(NamedTuple):
    """Numbers that a descent has measured before a step; the step's update holds them as extras."""

    extras: Sequence[float] = ()
    forward_passes: int = 0
    finite: bool = True  # whether all losses were


@dataclass(frozen=True)
class Probe:
    """The means by which a descent can measure before a step, on the step's own batch.

    `alone` gives the losses at the two points of each of some queries, of which each moves one
    block only. Such queries count from `first`, behind the step's own; `together` fit into one
    call.
    """

    theta: Mapping[str, mx.array]
    epsilon: float
    first: int
    together: int
    alone: Callable[[Mapping[int, Block]], tuple[Losses, Measured]]


class Descent(Part, ABC):
    """Applies updates in the order in which they are remembered, each to every tensor.

    Tensors are updated together in one evaluation for each direction, since a GPU waits for each.
    """

    scratch_copies: ClassVar[int]  # memory of an update, in multiples of the updated tensors

    @classmethod
    @abstractmethod
    def of_log(cls, fields: Mapping[str, Any], manifest: Manifest) -> Descent:
        """The descent that wrote these fields of a log's header, at its beginning."""

    @classmethod
    def check_extras(cls, gradients: Sequence[float], extras: Sequence[float]) -> None:
        """Check the extras, which follow the gradients in a step's line of the log.

        Raises:
            ValueError: it is not this descent's.
        """
        if extras:
            raise ValueError("it holds more than projected gradients")

    def due(self, step: int) -> bool:
        """Whether it must `measure` before a step."""
        return False

    def measure(self, probe: Probe) -> Measured:
        """Measure the numbers on which the next directions depend; all updates are applied."""
        return Measured()

    def direction(self, tensor: str, z: mx.array) -> mx.array:
        """The direction along which a tensor is perturbed where its noise is z."""
        return z

    def remember(self, update: Update) -> None:
        """Make this the update that `apply` applies."""
        self._latest = update

    @abstractmethod
    def apply(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        """Tensors after the latest update, evaluated."""

    def write(self, file: IO[bytes]) -> None:
        """Append to a save, after its line of JSON, the state that has the size of the adapters."""

    def read(self, file: IO[bytes]) -> None:
        """Read the state that `write` wrote, to the end of the file.

        Raises:
            ValueError: the file holds something else.
        """
        if file.read(1):
            raise ValueError("it goes on after its end")


class Sgd(Descent):
    """Each estimate on its own."""

    scratch_copies = 3  # theta, z and their sum

    @classmethod
    def of_log(cls, fields: Mapping[str, Any], manifest: Manifest) -> Sgd:
        return cls()

    def apply(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        return self._latest.apply(noise, tensors)


@dataclass
class Averages(Descent):
    """The base of momentum and Adam, with the numbers of the latest `window` estimates."""

    optimizer: ClassVar[str]
    log_fields = ("optimizer", "window")
    window: int
    _recent: deque[Update] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.window)

    @classmethod
    def of_log(cls, fields: Mapping[str, Any], manifest: Manifest) -> Averages:
        return AVERAGING[fields["optimizer"]](fields["window"])

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        optimizer, window = fields.get("optimizer"), fields.get("window")
        if optimizer not in tuple(AVERAGING):  # it may be a list, which has no hash
            raise ValueError(
                f"its optimizer is {optimizer!r}; it must be one of {', '.join(AVERAGING)}"
            )
        if type(window) is not int or not 1 <= window <= MOST_WINDOW:
            raise ValueError(f"its window is {window!r}, with {optimizer}")

    def header(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "window": self.window}

    def remember(self, update: Update) -> None:
        self._recent.append(update)

    def state(self) -> dict[str, Any]:
        return {"window": [[update.step, list(update.gradients)] for update in self._recent]}

    def restore(self, facts: Mapping[str, Any]) -> None:
        self._recent.clear()
        for step, gradients in facts["window"]:
            numbers = tuple(map(float, gradients))
            if type(step) is not int or not numbers or not all(map(math.isfinite, numbers)):
                raise ValueError(f"its window holds {step!r:.80} with {gradients!r:.80}")
            self._recent.append(Update(step, 0.0, numbers, 0.0))  # its own step is done

    def weights(self, beta: float) -> Sequence[float]:
        """The weight of each estimate, the earliest first; they sum to 1."""
        ages = range(len(self._recent) - 1, -1, -1)
        total = sum(beta**age for age in ages)
        return [beta**age / total for age in ages]


class Momentum(Averages):
    """The average of the estimates, the latest with the most weight."""

    optimizer, scratch_copies = "momentum", 4  # theta, the average, an estimate, z

    def apply(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        ms = {name: mx.zeros_like(value) for name, value in tensors.items()}
        for weight, update in zip(self.weights(BETA1), self._recent, strict=True):
            estimates = update.estimates(noise, tensors)
            ms = {name: m + estimates.pop(name) * weight for name, m in ms.items()}
            mx.eval(ms)  # so that no more than one estimate is in memory
        return self._recent[-1].moved(tensors, ms)


class Adam(Averages):
    """The average of the estimates, over the root of the average of their squares."""

    optimizer, scratch_copies = "adam", 6  # theta, both averages, an estimate, its square, z

    def apply(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        ms = {name: mx.zeros_like(value) for name, value in tensors.items()}
        vs = dict(ms)
        weights = zip(self.weights(BETA1), self.weights(BETA2), self._recent, strict=True)
        for first, second, update in weights:
            estimates = update.estimates(noise, tensors)
            ms = {name: m + estimates[name] * first for name, m in ms.items()}
            vs = {name: v + mx.square(estimates.pop(name)) * second for name, v in vs.items()}
            mx.eval(ms, vs)  # so that no more than one estimate is in memory
        steps = {name: m / (mx.sqrt(vs[name]) + ZETA) for name, m in ms.items()}
        return self._recent[-1].moved(tensors, steps)


AVERAGING: dict[str, type[Averages]] = {descent.optimizer: descent for descent in (Momentum, Adam)}
BY_NAME: dict[str, type[Descent]] = {"sgd": Sgd, **AVERAGING}


def descent_of(optimizer: str, window: int) -> Descent:
    """The descent of one of BY_NAME; plain SGD has no window."""
    return AVERAGING[optimizer](window) if optimizer in AVERAGING else Sgd()
