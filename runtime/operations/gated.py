"""The operation Gated: an MLP's activation, f(g) * u or f(g), computed by a kernel without a graph.

The lowering replaces an elementwise graph by it if the device has a kernel for it.
"""

from __future__ import annotations

from typing import ClassVar

from runtime.operations.base import Call, Function
from runtime.operations.execution import Execution

CHUNK_VALUES = 32_768  # at once: with fewer the calls of NumPy cost the most
SCRATCH_BYTES = 2 * CHUNK_VALUES * 4
PARAMETERS = {"xielu": 4}  # how many numbers activations take besides values


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
