"""Descent along directions that are scaled by an estimate of the Hessian's diagonal.

With S the estimate of each trained value's curvature, all ones at first, z_i the noise of the n
queries, g_i and h_i the first and second differences of the losses along z_i / sqrt(S), a the
smoothing and w the weight decay:

    S <- (1 - a) S + a (1/n) sum_i |h_i| S z_i^2
    theta <- theta - rate ((1/n) sum_i g_i z_i / sqrt(S) + w theta)

The second line takes the new S. S has the size of the adapters, and lies where the caller says. An
update has h_i as its extras.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import IO, Any

import mlx.core as mx
import numpy as np

from runtime.bundle.manifest import Manifest
from runtime.core.errors import DivergedError
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Descent
from runtime.methods.zeroth.scalar_update import Update


class HessianDescent(Descent):
    """Each estimate of the gradient on its own, scaled, and the estimate of the Hessian."""

    scratch_copies = 4  # theta, S, z and what becomes of them, tensor by tensor
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
            raise ValueError("holds no second difference for each gradient")

    def header(self) -> dict[str, Any]:
        return {"hessian_smoothing": self._smoothing}

    def remember(self, update: Update) -> None:
        self._latest = update

    def direction(self, tensor: str, z: mx.array) -> mx.array:
        """z / sqrt(S), with the S of the latest update that was applied to the tensor."""
        return z / mx.sqrt(self._estimate[tensor])

    def apply(self, noise: Noise, tensor: str, value: mx.array) -> mx.array:
        """See `Descent.apply`; the tensor's S changes with it.

        Raises:
            DivergedError: a value of S has become 0 or infinite.
        """
        latest, s = self._latest, self._estimate[tensor]
        seen = mx.zeros(value.shape)
        for query, h in enumerate(latest.extras):
            z = noise.draw(latest.step, query, tensor, value.shape)
            seen = seen + s * mx.square(z) * (abs(h) / len(latest.extras))
            mx.eval(seen)  # so that no more than one direction is in memory
        s = s * (1 - self._smoothing) + seen * self._smoothing
        if not _is_scale(s):
            raise DivergedError(
                f"in step {latest.step} the estimate of the curvature for {tensor} has left the "
                f"range of float32; lower --hessian-smoothing (now {self._smoothing:g}) or "
                "--learning-rate"
            )
        self._estimate[tensor] = s
        step = latest.estimate(noise, tensor, value.shape) / mx.sqrt(s)
        value = value - (step + value * latest.weight_decay) * latest.rate
        mx.eval(value)
        return value

    def write(self, file: IO[bytes]) -> None:
        """Append S after a line feed: float32 values, tensor after tensor."""
        file.write(b"\n")
        for tensor in self._shapes:
            file.write(np.array(self._estimate[tensor], copy=False).tobytes())

    def read(self, file: IO[bytes]) -> None:
        for tensor, shape in self._shapes.items():
            values = np.frombuffer(file.read(math.prod(shape) * 4), np.float32)
            s = mx.array(values).reshape(shape)  # ValueError if there is less
            if not _is_scale(s):
                raise ValueError(f"its curvature for {tensor} holds a value that is none")
            self._estimate[tensor] = s
        super().read(file)


def _is_scale(s: mx.array) -> bool:
    """Whether all values are finite and above 0, so that directions can be divided by the root."""
    return bool(mx.logical_and(s > 0, mx.isfinite(s)).all().item())
