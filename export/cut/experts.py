"""The tap of mlx-lm's experts, and stand-ins for their results until they are weighed and summed.

Its models all compute `(experts(x, chosen) * weights[..., None]).sum(axis=-2)`. The results of all
chosen experts, several times as large as the hidden state, need not exist for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu_oai

from export.cut.properties import computes
from export.cut.tape import ExpertsCall, Tap
from runtime.core.errors import BundleError
from runtime.operations.experts import Activation

if TYPE_CHECKING:
    from export.cut.taps import Taps

_TRIAL = (1, 8, 32)  # the shape that an activation is tried at
_GATES: dict[Activation, Callable[[mx.array, mx.array], mx.array]] = {
    "silu": lambda g, u: nn.silu(g) * u,
    "gelu_tanh": lambda g, u: nn.gelu_approx(g) * u,
    "clamped": swiglu_oai,
}


class ExpertsTap(Tap):
    """Stands in for a `SwitchGLU`."""

    def __init__(self, taps: Taps, name: str, experts: nn.Module) -> None:
        self.taps, self.name = taps, name
        self.count, self.columns, _ = experts.down_proj.weight.shape
        self.biased = "bias" in experts.gate_proj
        self.activation = _activation(name, experts.activation)

    def __call__(self, x: mx.array, chosen: mx.array) -> _Results:
        return _Results(self, x, mx.stop_gradient(chosen))

    def summed(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """The weighted sum (..., D) over the chosen experts, recorded as a call."""
        tape = self.taps.tape
        inputs = [tape.batched(array) for array in (x, weights, chosen.astype(mx.float32))]
        output = tape.output((*inputs[0].shape[:-1], self.columns))
        settings = (self.count, self.activation, self.biased)
        call = ExpertsCall(self.name, tuple(inputs), output, *settings)
        y = tape.record(call)
        return y if x.ndim == y.ndim else y.squeeze(0)


class _Results:
    """The results (..., k, D) of the chosen experts, before and after they are weighed."""

    dtype = mx.float32

    def __init__(
        self, tap: ExpertsTap, x: mx.array, chosen: mx.array, weights: mx.array | None = None
    ) -> None:
        self.tap, self.x, self.chosen, self.weights = tap, x, chosen, weights

    def astype(self, dtype: mx.Dtype) -> _Results:
        """The same: everything is float32."""
        return self

    def __mul__(self, weights: mx.array) -> _Results:
        if self.weights is not None or weights.shape != (*self.chosen.shape, 1):
            self._refuse(f"multiplied by {weights.shape}")
        return _Results(self.tap, self.x, self.chosen, weights.squeeze(-1))

    def sum(self, axis: int) -> mx.array:
        """The weighted sum (..., D)."""
        if self.weights is None or axis != -2:
            self._refuse(f"summed over axis {axis}")
        assert self.weights is not None
        return self.tap.summed(self.x, self.chosen, self.weights)

    def __getattr__(self, name: str) -> Any:
        return self._refuse(name)

    def _refuse(self, use: str) -> Any:
        raise BundleError(
            f"the results of the experts {self.__dict__['tap'].name} are used otherwise than in a "
            f"sum that is weighted token by token ({use}); such models are not supported"
        )


def _activation(name: str, module: Any) -> Activation:
    """The activation of experts. Raises BundleError for one that they may not have."""

    def forward(gate: mx.array, up: mx.array) -> list[mx.array]:
        return [module(up, gate)]

    def vjp(gate: mx.array, up: mx.array, dy: mx.array) -> list[mx.array]:
        return mx.vjp(lambda *primals: forward(*primals), [gate, up], [dy])[1]

    for known, gate in _GATES.items():
        if computes(gate, forward, vjp, *[_TRIAL] * 3):
            return known
    raise BundleError(
        f"{name} has experts with the activation {type(module).__name__}, which is not supported"
    )
