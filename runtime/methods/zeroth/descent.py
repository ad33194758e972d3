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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

import mlx.core as mx

from runtime.methods.noise import Noise
from runtime.methods.zeroth.scalar_update import Update

BETA1, BETA2, ZETA = 0.9, 0.999, 1e-8


class Descent(ABC):
    """Applies updates in the order in which they are remembered, each to every tensor."""

    optimizer: ClassVar[str]  # its name, one of OPTIMIZERS
    scratch_copies: ClassVar[int]  # memory of an update, in multiples of what it updates
    window: int = 0
    smoothing: float = 0.0  # of its estimate of the Hessian; 0 where it has none
    scaling: tuple[str, str] = ("", "")  # its layers' scales, and what they change

    def direction(self, tensor: str, z: mx.array) -> mx.array:
        """Along what a tensor is perturbed where its noise is z."""
        return z

    @abstractmethod
    def remember(self, update: Update) -> None:
        """Make this the update that `apply` applies."""

    @abstractmethod
    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        """A tensor after the latest update, evaluated."""

    def state(self) -> dict[str, Any]:
        """What a save must hold for the next step, as JSON."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:  # noqa: B027 - SGD keeps no state
        """Take what `state` gave.

        Raises:
            ValueError, KeyError, TypeError: `facts` hold something else.
        """

    def write(self, file: IO[bytes]) -> None:  # noqa: B027 - most keep nothing so large
        """Append to a save, after its line of JSON, what has the size of the adapters."""

    def read(self, file: IO[bytes]) -> None:
        """Read what `write` wrote, to the end of the file.

        Raises:
            ValueError: the file holds something else.
        """
        if file.read(1):
            raise ValueError("it goes on after its end")


class Sgd(Descent):
    """Each estimate on its own."""

    optimizer, scratch_copies = "sgd", 3  # theta, z and their sum

    def remember(self, update: Update) -> None:
        self._latest = update

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        return self._latest.apply(noise, tensor, value)


@dataclass
class Averages(Descent):
    """What momentum and Adam share: the numbers of the latest `window` estimates."""

    window: int
    _kept: deque[Update] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._kept = deque(maxlen=self.window)

    def remember(self, update: Update) -> None:
        self._kept.append(update)

    def state(self) -> dict[str, Any]:
        return {"window": [[one.step, list(one.gradients)] for one in self._kept]}

    def restore(self, facts: Mapping[str, Any]) -> None:
        self._kept.clear()
        for step, gradients in facts["window"]:
            numbers = tuple(map(float, gradients))
            if type(step) is not int or not numbers or not all(map(math.isfinite, numbers)):
                raise ValueError(f"its window holds {step!r:.80} with {gradients!r:.80}")
            self._kept.append(Update(step, 0.0, numbers, 0.0))  # its own step is done

    def weights(self, beta: float) -> Sequence[float]:
        """The weight of each estimate, the earliest first; they sum to 1."""
        ages = range(len(self._kept) - 1, -1, -1)
        total = sum(beta**age for age in ages)
        return [beta**age / total for age in ages]


class Momentum(Averages):
    """The average of the estimates, the latest with the most weight."""

    optimizer, scratch_copies = "momentum", 4  # theta, the average, an estimate, z

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        latest = self._kept[-1]
        m = mx.zeros_like(value)
        for weight, update in zip(self.weights(BETA1), self._kept, strict=True):
            m = m + update.estimate(noise, tensor, value.shape) * weight
            mx.eval(m)  # so that no more than one estimate is in memory
        value = value - (m + value * latest.weight_decay) * latest.rate
        mx.eval(value)
        return value


class Adam(Averages):
    """The average of the estimates, over the root of the average of their squares."""

    optimizer, scratch_copies = "adam", 6  # theta, both averages, an estimate, its square, z

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        latest = self._kept[-1]
        m = v = mx.zeros_like(value)
        weights = zip(self.weights(BETA1), self.weights(BETA2), self._kept, strict=True)
        for first, second, update in weights:
            estimate = update.estimate(noise, tensor, value.shape)
            m, v = m + estimate * first, v + mx.square(estimate) * second
            mx.eval(m, v)  # so that no more than one estimate is in memory
        step = m / (mx.sqrt(v) + ZETA) + value * latest.weight_decay
        value = value - step * latest.rate
        mx.eval(value)
        return value


AVERAGING: dict[str, type[Averages]] = {one.optimizer: one for one in (Momentum, Adam)}
OPTIMIZERS = (Sgd.optimizer, *AVERAGING)


def descent_of(optimizer: str, window: int) -> Descent:
    """The descent of one of OPTIMIZERS; plain SGD has no window."""
    return AVERAGING[optimizer](window) if optimizer in AVERAGING else Sgd()
