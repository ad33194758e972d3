"""The operation Gated: an MLP's activation, f(g) * u or f(g), computed by a kernel without a graph.

The lowering replaces an elementwise graph by it if the device has a kernel for it.
"""

from __future__ import annotations

import math
from typing import ClassVar

from runtime.operations.base import Call, Function
from runtime.operations.execution import Execution

CHUNK_VALUES = 32_768  # at once: with fewer the calls of NumPy cost the most
SCRATCH_BYTES = 2 * CHUNK_VALUES * 4
PARAMETERS = {"xielu": 4}  # how many numbers activations take besides values
_GELU = 2 * math.sqrt(2 / math.pi)
LOGISTIC = {"silu": (1.0, 0.0), "gelu_tanh": (_GELU, 0.044715 * _GELU), "clamped": (1.702, 0.0)}
"""By activation what z(g) = first * g + second * g**3 takes, where f(g) = g s(z(g)) with the
logistic function s. There is compiled code for these."""


class Gated(Function, frozen=True):
    """y = f(g) * u of two inputs, or of the halves of one; f(g) of one as wide as y.

    f is the `activation`, see `Elementwise.gated`; its parameters, single numbers, follow the
    values. It is never in a bundle.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str]
    activation: str

    takes_parameters: ClassVar[bool] = True
    cheap: ClassVar[bool] = True

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset(self.activations)

    def in_place(self, execution: Execution) -> bool:
        """Whether f(g) * u is computed in the memory of g: by compiled code, without scratch."""
        return execution.compiled and self.activation in LOGISTIC

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """A chunk of scratch, and the gradients that are computed but not wanted."""
        made = self.activations if call.backward else self.outputs
        return SCRATCH_BYTES + (len(made) - len(call.wanted)) * call.bytes_of(self.outputs[0])

    def hole_beside_kept(self, call: Call) -> int:
        """The result's bytes, where gate and up are one value.

        The gradient of that value does not fit where the result lay.
        """
        made, given = (call.bytes_of(names[0]) for names in (self.outputs, self.activations))
        return made if given > made else 0
