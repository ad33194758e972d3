"""The zeroth-order estimators as their papers print them: whole adapters, one forward per loss.

Each is a transcription of its equations that knows nothing of blocks, lanes, deferred updates or
logs. The losses are those of the bundle's own kernels, and theta is never restored by subtraction,
so the methods in `runtime.methods` can be compared with these bit for bit.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from oracles.whole_model import plain_loss
from runtime.engine.model import Model
from runtime.engine.sample import Sample
from runtime.methods.adapters import Adapters, Tensors
from runtime.methods.noise import Noise, key_of, number_of


class Monolithic:
    """An estimator on whole adapters, which it changes in place."""

    queries = 2  # directions a step

    def __init__(self, adapters: Adapters, seed: int, epsilon: float, weight_decay: float) -> None:
        self.adapters, self.seed = adapters, seed
        self.epsilon, self.weight_decay = epsilon, weight_decay

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> Any:
        """Change the adapters by one step; unless said otherwise, along SPSA's mean estimate."""
        g = [self.projected(model, rows, number, i) for i in range(self.queries)]
        self.descend(number, rate, [one / self.queries for one in g])

    def direction(self, number: int, query: int, name: str) -> mx.array:
        """z of one tensor: Gaussian, drawn anew in each step."""
        return Noise(self.seed).draw(number, query, name, self.adapters.tensors[name].shape)

    def loss(
        self, model: Model, rows: Sequence[Sample], number: int, query: int, by: float
    ) -> float:
        """The mean loss at theta + by z."""
        theta = self.adapters.tensors
        tensors = {name: theta[name] + self.direction(number, query, name) * by for name in theta}
        moved = Adapters(self.adapters.manifest, tensors)
        return plain_loss(model, moved, rows)

    def projected(self, model: Model, rows: Sequence[Sample], number: int, query: int) -> float:
        """SPSA's (loss(theta + eps z) - loss(theta - eps z)) / (2 eps)."""
        plus = self.loss(model, rows, number, query, self.epsilon)
        minus = self.loss(model, rows, number, query, -self.epsilon)
        return (plus - minus) / (2 * self.epsilon)

    def descend(self, number: int, rate: float, weights: Sequence[float]) -> None:
        """theta <- theta - rate (sum of weight z over the queries + weight_decay theta)."""
        for name, theta in self.adapters.tensors.items():
            update = theta * self.weight_decay
            for query, weight in enumerate(weights):
                update = update + self.direction(number, query, name) * weight
            self.adapters.tensors[name] = theta - update * rate
        mx.eval(self.adapters.tensors)


class MonolithicMeZO(Monolithic):
    """MeZO's Algorithms 1 and 2 as published: all parameters perturbed, then a whole forward.

    theta - eps z is computed from theta, where the paper perturbs thrice, which rounds.
    """

    def __init__(
        self, adapters: Adapters, noise: Noise, epsilon: float, queries: int, weight_decay: float
    ) -> None:
        super().__init__(adapters, noise.seed, epsilon, weight_decay)
        self.noise, self.queries = noise, queries

    def direction(self, number: int, query: int, name: str) -> mx.array:
        return self.noise.draw(number, query, name, self.adapters.tensors[name].shape)

    def step(
        self, model: Model, rows: Sequence[Sample], number: int, rate: float
    ) -> tuple[float, list[float]]:
        """Returns the mean of all losses, and the projected gradients."""
        both = (self.epsilon, -self.epsilon)
        losses = [
            [self.loss(model, rows, number, query, by) for by in both]
            for query in range(self.queries)
        ]
        gradients = [(plus - minus) / (2 * self.epsilon) for plus, minus in losses]
        self.descend(number, rate, [gradient / self.queries for gradient in gradients])
        return sum(map(sum, losses)) / (2 * len(losses)), gradients


class MonolithicFZOO(Monolithic):
    """FZOO with N directions of signs (arXiv 2506.09034)."""

    N = 4

    def direction(self, number: int, query: int, name: str) -> mx.array:
        shape = self.adapters.tensors[name].shape
        return Noise(self.seed, "rademacher").draw(number, query, name, shape)

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        l0 = plain_loss(model, self.adapters, rows)
        l = [self.loss(model, rows, number, i, self.epsilon) for i in range(self.N)]  # noqa: E741
        sigma = statistics.stdev(l)
        G = [(loss - l0) / (self.epsilon * sigma) / self.N for loss in l]
        self.descend(number, rate, G)


class MonolithicMoments(Monolithic, ABC):
    """MeZO whose estimates are averaged over the last `window` of them (appendix B.2)."""

    window = 4

    def __init__(self, adapters: Adapters, seed: int, epsilon: float, weight_decay: float) -> None:
        super().__init__(adapters, seed, epsilon, weight_decay)
        self.estimates: list[Tensors] = []  # of every step, whole

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        g = [self.projected(model, rows, number, query) for query in range(self.queries)]
        estimate = {name: mx.zeros_like(theta) for name, theta in self.adapters.tensors.items()}
        for query in range(self.queries):
            for name in estimate:
                z = self.direction(number, query, name)
                estimate[name] = estimate[name] + z * (g[query] / self.queries)
        self.estimates.append(estimate)
        for name, theta in self.adapters.tensors.items():
            direction = self.averaged(name) + theta * self.weight_decay
            self.adapters.tensors[name] = theta - direction * rate
        mx.eval(self.adapters.tensors)

    @abstractmethod
    def averaged(self, name: str) -> mx.array:
        """The direction of a step, from all estimates."""

    def average(self, name: str, beta: float, squared: bool = False) -> mx.array:
        """The weighted average of the latest estimates, or of their squares."""
        latest = self.estimates[-self.window :][::-1]
        total = sum(beta**age for age in range(len(latest)))
        found = mx.zeros_like(self.adapters.tensors[name])
        for age in reversed(range(len(latest))):
            G = latest[age][name]
            found = found + (G * G if squared else G) * (beta**age / total)
        return found


class MonolithicMomentum(MonolithicMoments):
    """m of the estimates."""

    def averaged(self, name: str) -> mx.array:
        return self.average(name, 0.9)


class MonolithicAdam(MonolithicMoments):
    """m / (sqrt(v) + 1e-8) of the estimates."""

    def averaged(self, name: str) -> mx.array:
        return self.average(name, 0.9) / (mx.sqrt(self.average(name, 0.999, True)) + 1e-8)


class MonolithicKZOO(Monolithic):
    """KZOO: a pool of K seeds (arXiv 2312.06353), 4 estimates a step (MeBP's appendix A)."""

    K, queries = 16, 4

    def direction(self, number: int, query: int, name: str) -> mx.array:
        j = number_of(self.seed, "member", number, query) % self.K
        shape = self.adapters.tensors[name].shape
        return mx.random.normal(shape, key=key_of(self.seed, "pool", j, name))


class MonolithicResidual(Monolithic):
    """The one-point estimate with residual feedback (MeZO's Definition 8), 2 directions a step."""

    before: list[float] | None = None

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        now = [self.loss(model, rows, number, i, self.epsilon) for i in range(self.queries)]
        before = now if self.before is None else self.before
        g = [(now[i] - before[i]) / self.epsilon for i in range(self.queries)]
        self.descend(number, rate, [one / self.queries for one in g])
        self.before = now


class MonolithicHiZOO(Monolithic):
    """HiZOO (arXiv 2402.15173) with the mean over 2 directions a step; S is 1 / Sigma."""

    n, alpha = 2, 1e-3

    def __init__(self, adapters: Adapters, seed: int, epsilon: float, weight_decay: float) -> None:
        super().__init__(adapters, seed, epsilon, weight_decay)
        self.S = {name: mx.ones_like(theta) for name, theta in adapters.tensors.items()}

    def direction(self, number: int, query: int, name: str) -> mx.array:
        return super().direction(number, query, name) / mx.sqrt(self.S[name])

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        eps, n = self.epsilon, self.n
        l0 = plain_loss(model, self.adapters, rows)
        plus = [self.loss(model, rows, number, i, eps) for i in range(n)]
        minus = [self.loss(model, rows, number, i, -eps) for i in range(n)]
        g = [(plus[i] - minus[i]) / (2 * eps) for i in range(n)]
        h = [(plus[i] + minus[i] - 2 * l0) / (2 * eps * eps) for i in range(n)]
        for name, theta in self.adapters.tensors.items():
            z = [Noise(self.seed).draw(number, i, name, theta.shape) for i in range(n)]
            S = self.S[name]
            hessian = sum(S * (z[i] * z[i]) * (abs(h[i]) / n) for i in range(n))
            S = self.S[name] = S * (1 - self.alpha) + hessian * self.alpha
            gradient = sum(z[i] * (g[i] / n) for i in range(n)) / mx.sqrt(S)
            update = gradient + theta * self.weight_decay
            self.adapters.tensors[name] = theta - update * rate
        mx.eval(self.adapters.tensors, self.S)


class MonolithicScaled(Monolithic):
    """MeZO's Definitions 6 and 7 with two directions a step, and d of the first step, or of more.

    d is the block vector of the layers' parameter norms, or of Proposition 1's gradient norms.
    """

    n, of_gradient, unbiased, interval = 2, False, True, 0

    def __init__(self, adapters: Adapters, seed: int, epsilon: float, weight_decay: float) -> None:
        super().__init__(adapters, seed, epsilon, weight_decay)
        self.d: dict[str, float] = {}
        self.since = 0

    def layers(self, model: Model) -> list[list[str]]:
        """The tensors of each layer."""
        starts = [f"{block.name}." for block in model.blocks[1:-1]]
        found = [[name for name in self.adapters.tensors if name.startswith(s)] for s in starts]
        return [names for names in found if names]

    def norm(self, model: Model, rows: Sequence[Sample], number: int, layer: int) -> float:
        theta, names = self.adapters.tensors, self.layers(model)[layer]
        if not self.of_gradient:
            squares = [np.square(np.array(theta[name], np.float64)).sum() for name in names]
            return math.sqrt(sum(map(float, squares)))
        losses = []
        for by in (self.epsilon, -self.epsilon):
            z = {name: super(MonolithicScaled, self).direction(number, self.n + layer, name)
                 for name in names}  # fmt: skip
            tensors = {**theta, **{name: theta[name] + z[name] * by for name in names}}
            moved = Adapters(self.adapters.manifest, tensors)
            losses.append(plain_loss(model, moved, rows))
        return abs((losses[0] - losses[1]) / (2 * self.epsilon))

    def direction(self, number: int, query: int, name: str) -> mx.array:
        return super().direction(number, query, name) / self.d[name]

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        if not self.d or (self.interval and number - self.since >= self.interval):
            self.since = number
            for layer, names in enumerate(self.layers(model)):
                norm = self.norm(model, rows, number, layer)
                self.d |= dict.fromkeys(names, norm)
        g = [self.projected(model, rows, number, query) for query in range(self.n)]
        for name, theta in self.adapters.tensors.items():
            update = theta * self.weight_decay
            for query in range(self.n):
                z = super().direction(number, query, name)
                dz = z * self.d[name] if self.unbiased else z
                update = update + dz * (g[query] / self.n)
            self.adapters.tensors[name] = theta - update * rate
        mx.eval(self.adapters.tensors)


class MonolithicParameterNorm(MonolithicScaled):
    """Definition 6 with parameter norms, measured again every two steps."""

    interval = 2


class MonolithicGradientNorm(MonolithicScaled):
    """Definition 7 with gradient norms: the normalized gradient."""

    of_gradient, unbiased = True, False


class MonolithicZOAct(Monolithic):
    """ZO-Act (arXiv 2607.01125): the coefficients, which are B, of a basis, which is A."""

    def direction(self, number: int, query: int, name: str) -> mx.array:
        z = super().direction(number, query, name)
        return z if name.endswith("lora_b") else mx.zeros_like(z)

    def step(self, model: Model, rows: Sequence[Sample], number: int, rate: float) -> None:
        basis = {name: a for name, a in self.adapters.tensors.items() if name.endswith("lora_a")}
        super().step(model, rows, number, rate)
        self.adapters.tensors.update(basis)  # no weight decay either
