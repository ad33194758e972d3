"""HiZOO: MeZO along directions that are shorter where the loss is more curved.

Zhao et al., *Second-Order Fine-Tuning without Pain for LLMs: a Hessian Informed Zeroth-Order
Optimizer* (arXiv 2402.15173). S is an estimate of the Hessian's diagonal, one value for each
trained one, all ones at first (the paper's Sigma is 1 / S); z is Gaussian:

    d = z / sqrt(S)
    l+ = loss(theta + eps d)      l- = loss(theta - eps d)      l = loss(theta)
    g = (l+ - l-) / (2 eps)       h = (l+ + l- - 2 l) / (2 eps^2)
    S <- (1 - a) S + a |h| S z^2
    theta <- theta - rate g z / sqrt(S)

As in the authors' code, the last line takes the new S, and nothing is clipped. With several
directions, all see the old S, l is evaluated once, and both updates are the means over all. a is
`--hessian-smoothing`. A step's log holds every g and h, as gradients and extras of its update, from
which S is rebuilt too. S has the size of the adapters, and lies where the caller says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import mlx.core as mx
import numpy as np

from runtime.bundle.manifest import Manifest
from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.config.zeroth_order import USUAL_SMOOTHING
from runtime.core.errors import DivergedError, UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.zeroth.descent import Descent, Tensors
from runtime.methods.zeroth.estimator import THETA, Losses, Point
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand
from runtime.storage.scratch import MappedTensors


class HessianDescent(Descent):
    """Each estimate of the gradient on its own, along z / sqrt(S), and the estimate S.

    With g_i and h_i the first and second differences of the losses along direction i of n, a the
    smoothing and w the weight decay:

        S <- (1 - a) S + a (1/n) sum_i |h_i| S z_i^2
        theta <- theta - rate ((1/n) sum_i g_i z_i / sqrt(S) + w theta)
    """

    scratch_copies = 5  # theta, S, z, their product, and the sum of products
    log_fields = ("hessian_smoothing",)

    def __init__(
        self,
        smoothing: float,
        shapes: Mapping[str, tuple[int, ...]],
        estimate: MutableMapping[str, mx.array],
    ) -> None:
        """`estimate` will hold S by tensor; all of `shapes` become ones in it."""
        self._smoothing = smoothing
        self._shapes, self._estimate = dict(shapes), estimate
        for tensor, shape in shapes.items():
            estimate[tensor] = mx.ones(shape)

    @classmethod
    def of_log(cls, fields: Mapping[str, Any], manifest: Manifest) -> HessianDescent:
        return cls(fields["hessian_smoothing"], Adapters.shapes(manifest), {})

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        smoothing = fields["hessian_smoothing"]
        if type(smoothing) not in (int, float) or not 0 < smoothing < 1:
            raise ValueError(f"its smoothing of the Hessian is {smoothing!r}")

    @classmethod
    def check_extras(cls, gradients: Sequence[float], extras: Sequence[float]) -> None:
        if len(extras) != len(gradients):
            raise ValueError("it holds no second difference for each gradient")

    def header(self) -> dict[str, Any]:
        return {"hessian_smoothing": self._smoothing}

    def direction(self, tensor: str, z: mx.array) -> mx.array:
        """z / sqrt(S), with the S of the latest update that was applied to the tensor."""
        return z / mx.sqrt(self._estimate[tensor])

    def apply(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        """See `Descent.apply`; the tensors' S changes with them.

        Raises:
            DivergedError: a value of S has become 0 or infinite.
        """
        latest, estimate = self._latest, self._next_estimate(noise, tensors)
        self._estimate.update(estimate)
        steps = latest.estimates(noise, tensors)
        mx.eval(steps)  # before the roots are there
        steps = {name: step / mx.sqrt(estimate[name]) for name, step in steps.items()}
        return latest.moved(tensors, steps)

    def _next_estimate(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        """S of some tensors after the latest update, evaluated and checked."""
        latest, a = self._latest, self._smoothing
        old = {name: self._estimate[name] for name in tensors}
        seen = {name: mx.zeros(value.shape) for name, value in tensors.items()}
        for query, h in enumerate(latest.extras):
            seen = {
                name: seen[name]
                + s
                * mx.square(noise.draw(latest.step, query, name, s.shape))
                * (abs(h) / len(latest.extras))
                for name, s in old.items()
            }
            mx.eval(seen)  # so that no more than one direction is in memory
        new = {name: old.pop(name) * (1 - a) + seen.pop(name) * a for name in tensors}
        right = {name: _are_scales(s) for name, s in new.items()}
        mx.eval(new, right)
        for name in tensors:
            if not right[name].item():
                raise DivergedError(
                    f"in step {latest.step} the estimate of the curvature for {name} has left the "
                    f"range of float32; lower --hessian-smoothing (now {a:g}) or --learning-rate"
                )
        return new

    def write(self, file: IO[bytes]) -> None:
        """Append S after a line feed: float32 values, tensor after tensor."""
        file.write(b"\n")
        for tensor in self._shapes:
            file.write(np.array(self._estimate[tensor], copy=False).tobytes())

    def read(self, file: IO[bytes]) -> None:
        for tensor, shape in self._shapes.items():
            values = np.frombuffer(file.read(math.prod(shape) * 4), np.float32)
            s = mx.array(values).reshape(shape)  # ValueError if there is less
            if not _are_scales(s).item():
                raise ValueError(f"its curvature for {tensor} holds a value that is none")
            self._estimate[tensor] = s
        super().read(file)


def _are_scales(s: mx.array) -> mx.array:
    """Whether all values are finite and above 0, so that directions can be divided by the root."""
    return mx.logical_and(s > 0, mx.isfinite(s)).all()


@dataclass
class ThreePoint(TwoPoint):
    """SPSA, and with the loss at theta the second differences along the same directions."""

    @property
    def points(self) -> Sequence[Point]:
        return [THETA, *super().points]

    def extras(self, losses: Losses, epsilon: float) -> tuple[float, ...]:
        return tuple(
            (losses[plus] + losses[minus] - 2 * losses[THETA]) / (2 * epsilon * epsilon)
            for plus, minus in self.compared
        )


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction, and one; and S on the disk.

    Raises:
        UsageError: all parameters are to be trained.
    """
    if config.trains_all:
        raise UsageError(
            f"--trainable full is not for {config.method}: it keeps a float32 estimate of the "
            "curvature for each trained value, which would be another copy of the model; give "
            "--method mezo, or --trainable lora"
        )
    return replace(demand_of(config, ThreePoint(config.directions), HessianDescent), moments=1)


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning."""
    shapes = Adapters.shapes(begin.adapters.manifest)
    on_disk = MappedTensors(begin.scratch, "optimizer", shapes)
    descent = HessianDescent(config.hessian_smoothing or USUAL_SMOOTHING, shapes, on_disk)
    return start_with(config, begin, ThreePoint(config.directions), descent)
