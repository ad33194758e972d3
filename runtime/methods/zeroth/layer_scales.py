"""Directions that are scaled layer by layer: by the norm of its parameters, or of its gradient.

MeZO (arXiv 2305.17333), appendices B.3 and B.4. With d_l the scale of all trained values of layer
l, z noise, d z and z / d products and quotients layer by layer, and w the weight decay:

    g_i = (loss(theta + eps z_i / d) - loss(theta - eps z_i / d)) / (2 eps)
    variance      theta <- theta - rate ((1/n) sum_i g_i d z_i + w theta)       (Definition 6)
    expectation   theta <- theta - rate ((1/n) sum_i g_i z_i + w theta)         (Definition 7)

The first is unbiased, whatever d is; the second follows the gradient divided by d. d_l is

    parameter-norm   |theta_l|
    gradient-norm    |loss(theta + eps z_l) - loss(theta - eps z_l)| / (2 eps)   (Proposition 1)

with z_l noise in layer l and zeros elsewhere, which takes two forward passes per layer. A norm of 0
counts as 1, as in the authors' code. Scales are measured before the first step, and again whenever
`interval` steps have passed. They are part of that step's update, so a log holds them; a step that
is skipped leaves them to the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from runtime.arrays.stored import Block
from runtime.bundle.manifest import Manifest
from runtime.config.zeroth_order import SCALED, SCALINGS
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Descent, Measured, Probe, Tensors, Update
from runtime.methods.zeroth.estimator import MINUS, PLUS, Point, projected_gradient


class ScaledDescent(Descent):
    """Each estimate of the gradient on its own, along directions that are scaled by layer."""

    scratch_copies = 4  # theta, z, z scaled, and their sum
    log_fields = ("scaling", "scaled")

    def __init__(self, scaling: str, scaled: str, interval: int, manifest: Manifest) -> None:
        """`interval` is in steps; 0 measures the scales only once."""
        self._scaling, self._scaled, self._interval = scaling, scaled, interval
        self.layers: tuple[Block, ...] = tuple(filter(manifest.adapted, manifest.blocks))
        self._names = [list(manifest.adapter_shapes(block)) for block in self.layers]
        self._index = {full: index for index, of in enumerate(self._names) for full in of}
        self._scales: tuple[float, ...] = ()  # of the next directions
        self._latest_scales: tuple[float, ...] = ()  # of the latest update
        self._measured = 0  # in which step they were

    @classmethod
    def of_log(cls, fields: Mapping[str, Any], manifest: Manifest) -> ScaledDescent:
        return cls(fields["scaling"], fields["scaled"], 0, manifest)

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        scaling, scaled = fields.get("scaling"), fields.get("scaled")
        if scaling not in SCALINGS or scaled not in SCALED:
            raise ValueError(f"its layers have scales of {scaling!r} for {scaled!r}")

    @classmethod
    def check_extras(cls, gradients: Sequence[float], extras: Sequence[float]) -> None:
        if wrong := [scale for scale in extras if not is_scale(scale)]:
            raise ValueError(f"it holds the scale {wrong[0]!r}, which is no number above 0")

    def header(self) -> dict[str, Any]:
        return {"scaling": self._scaling, "scaled": self._scaled}

    def due(self, step: int) -> bool:
        waited = step - self._measured
        return not self._latest_scales or bool(self._interval and waited >= self._interval)

    def measure(self, probe: Probe) -> Measured:
        """The scales of the next directions, one for each layer."""
        if self._scaling == SCALINGS[0]:
            theta = probe.theta
            measured = Measured([norm_of(theta[name] for name in of) for of in self._names])
        else:
            measured = self._gradient_norms(probe)
        return measured._replace(extras=self.scale(measured.extras))

    def _gradient_norms(self, probe: Probe) -> Measured:
        """Proposition 1 for each layer, which a query of its own moves alone."""
        norms: list[float] = []
        passes, finite, size = 0, True, max(1, probe.together)
        for at in range(0, len(self.layers), size):
            group = dict(enumerate(self.layers[at : at + size], start=probe.first + at))
            means, seen = probe.alone(group)
            passes, finite = passes + seen.forward_passes, finite and seen.finite
            for query in group:
                plus, minus = means[Point(query, PLUS)], means[Point(query, MINUS)]
                norms.append(abs(projected_gradient(plus, minus, probe.epsilon)))
        return Measured(norms, passes, finite)

    def scale(self, norms: Sequence[float]) -> tuple[float, ...]:
        """Let the next directions have the scales of these norms, one per layer; return them."""
        self._scales = tuple(norm or 1.0 for norm in norms)
        return self._scales

    def direction(self, tensor: str, z: mx.array) -> mx.array:
        """z / d"""
        return z / self._scales[self._index[tensor]]

    def remember(self, update: Update) -> None:
        super().remember(update)
        if update.extras:
            if len(update.extras) != len(self.layers):
                raise ValueError(f"{len(update.extras)} scales for {len(self.layers)} layers")
            self._scales = self._latest_scales = update.extras
            self._measured = update.step
        elif not self._latest_scales:
            raise ValueError("it comes before any scales of the layers")

    def apply(self, noise: Noise, tensors: Tensors) -> dict[str, mx.array]:
        if self._scaled != SCALED[0]:
            return self._latest.apply(noise, tensors)
        scales = {name: self._latest_scales[self._index[name]] for name in tensors}
        return self._latest.apply(noise, tensors, scales)

    def state(self) -> dict[str, Any]:
        return {"scales": list(self._latest_scales), "measured": self._measured}

    def restore(self, facts: Mapping[str, Any]) -> None:
        scales, measured = tuple(map(float, facts["scales"])), facts["measured"]
        if type(measured) is not int or measured < 0 or len(scales) not in (0, len(self.layers)):
            raise ValueError(f"it holds {len(scales)} scales of step {measured!r:.80}")
        if not all(map(is_scale, scales)):
            raise ValueError("a scale of a layer is not a number above 0")
        self._scales = self._latest_scales = scales
        self._measured = measured


def is_scale(value: float) -> bool:
    """Whether directions can be divided by it."""
    return 0 < value < math.inf


def norm_of(tensors: Iterable[mx.array]) -> float:
    """The norm of all values of some tensors together, summed in float64."""
    squares = (
        np.square(np.array(tensor, copy=False), dtype=np.float64).sum() for tensor in tensors
    )
    return math.sqrt(sum(map(float, squares)))
