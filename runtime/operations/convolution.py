"""The operation Convolution: a short causal filter over tokens, one for each channel.

Where a sequence holds several packed rows, a filter does not reach back into the row before. While
decoding, the last inputs are kept in a ring, as `CachedAttention` keeps keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from runtime.arrays.stored import pages
from runtime.operations.attention import slots_of
from runtime.operations.base import Call, Function, Operation, Scope, require
from runtime.operations.execution import Execution
from runtime.operations.values import Shape, is_parameter, shape_at

MOST_WIDTH = 64  # of a filter: each token is multiplied so often
SCRATCH_BYTES = 1 << 17  # of products before they are added


class Convolution(Function, frozen=True):
    """y_t = sum over j < width of w[:, width - 1 - j] * x_(t - j) (+ b), for x, y (1, T, C).

    The inputs are x, and the parameters w (C, width, 1) and, where there is one, b (C,).
    """

    inputs: tuple[str, ...]
    outputs: tuple[str]
    width: int

    takes_parameters: ClassVar[bool] = True

    def decoding(self, context: int) -> Operation:
        """`CachedConvolution`, which knows the last inputs."""
        slots = slots_of(context, self.width)
        return CachedConvolution(self.inputs, self.outputs, self.width, slots)

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The products that wait to be added, and the filters as they are read and by factor."""
        row = call.bytes_of(self.inputs[0]) // call.tokens
        return max(row, min(row * call.tokens, SCRATCH_BYTES)) + 2 * self.width * row

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """Every product and every sum, and the filters."""
        whole = call.bytes_of(self.inputs[0])
        return 2 * self.width * (pages(whole) + pages(whole // call.tokens)) + pages(whole)

    def check(self, scope: Scope) -> None:
        where = f"{scope.where}: convolution"
        source, *read = self.inputs
        good = not is_parameter(source) and 1 <= len(read) <= 2 and all(map(is_parameter, read))
        require(good and len(set(read)) == len(read), f"{where} of {self.inputs}")
        require(1 <= self.width <= MOST_WIDTH, f"{where} of width {self.width}")
        shape = scope.values[source]
        require(shape[0] == 1 and len(shape) == 3, f"{where} of {shape}")
        require(scope.values[self.outputs[0]] == shape, f"{where} of {shape}")
        channels = shape[2]
        for name, expected in zip(read, [(channels, self.width, 1), (channels,)], strict=False):
            stored = scope.parameters[name[1:]]
            require(stored == expected, f"{where}: {name} is {stored}, expected {expected}")

    def describe(self, values: Mapping[str, Shape]) -> str:
        channels = values[self.outputs[0]][2]
        return f"convolution over {self.width} tokens -> Tx{channels}"


class CachedConvolution(Convolution, frozen=True):
    """The same of new tokens, after the last ones in a ring of `slots`; never in a bundle."""

    slots: int

    @property
    def cache(self) -> str:
        """The name of the last inputs."""
        return f"{self.outputs[0]}.past"

    def cached(self, values: Mapping[str, Shape]) -> Mapping[str, tuple[int, ...]]:
        """Shaped (1, 1, slots, C), so that slots are on the same axis as those of keys."""
        batch, slots, channels = shape_at(values[self.inputs[0]], self.slots)
        return {self.cache: (batch, 1, slots, channels)}

    def working_bytes(self, call: Call, execution: Execution) -> int:
        row = call.bytes_of(self.inputs[0]) // call.tokens
        return super().working_bytes(call, execution) + 2 * (self.width + call.tokens) * row
