"""Causal filters, one factor after another, and their backward by hand.

The gradient of x is the same filter in the other direction:

    dx_t = sum over j of w[:, width - 1 - j] * dy_(t + j)

Each of the rows of a sequence is filtered by itself. The filters are frozen. The reference is
`tests.oracles.whole_model.convolution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import Arrays
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.cached_attention_kernel import put_in_ring
from runtime.operations.convolution import CachedConvolution, Convolution
from runtime.operations.kernel import Kernel, Run, Starts, starts_of
from runtime.operations.values import POSITION, gradient_of


def forward(
    x: mx.array, w: mx.array, bias: mx.array | None, starts: Starts | None, arrays: Arrays
) -> mx.array:
    """y (T, C), evaluated, of x (T, C) and w (C, width, 1).

    starts: where each token's row starts, in a sequence of packed rows.
    """
    y = mx.zeros(x.shape) if bias is None else mx.zeros(x.shape) + bias
    arrays.settle(y)
    for factor, later, earlier in _steps(x.shape[0], w, starts, arrays):
        arrays.add_product(y, later, x, earlier, factor)
    return y


def backward(dy: mx.array, w: mx.array, starts: Starts | None, arrays: Arrays) -> mx.array:
    """dx (T, C), evaluated, from dy (T, C)."""
    dx = mx.zeros(dy.shape)
    arrays.settle(dx)
    for factor, later, earlier in _steps(dy.shape[0], w, starts, arrays):
        arrays.add_product(dx, earlier, dy, later, factor)
    return dx


def _steps(
    tokens: int, w: mx.array, starts: Starts | None, arrays: Arrays
) -> Iterator[tuple[mx.array, slice, slice]]:
    """Each factor (C,) with tokens of a row, and those as many places before with which it goes."""
    factors = [mx.contiguous(w[:, at, 0]) for at in reversed(range(w.shape[1]))]
    arrays.settle(factors)
    begins = [0] if starts is None else np.unique(starts).tolist()
    for begin, end in zip(begins, [*begins[1:], tokens], strict=True):
        for back, factor in enumerate(factors):
            if back < end - begin:
                yield factor, slice(begin + back, end), slice(begin, end - back)


class ConvolutionKernel(Kernel):
    """The `Convolution` operation, and its backward."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Convolution)
        for values, own in zip(lanes, loras, strict=True):
            x = values[operation.inputs[0]].squeeze(0)
            w, bias = self.parameters(run, own)
            y = forward(x, w, bias, starts_of(values), self.tools.arrays)
            values[operation.outputs[0]] = y[None]

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation = run.operation(Convolution)
        dy = values[gradient_of(operation.outputs[0])].squeeze(0)
        w, _ = self.parameters(run, loras)
        dx = backward(dy, w, starts_of(values), self.tools.arrays)
        return {operation.inputs[0]: dx[None]}

    def parameters(self, run: Run, loras: Loras) -> tuple[mx.array, mx.array | None]:
        """w (C, width, 1), and b (C,) where there is one, as a lane sees them."""
        _, *names = run.operation(Convolution).inputs
        w, *bias = (self.tools.argument(run.block, name, {}, loras) for name in names)
        return w, bias[0] if bias else None


class CachedConvolutionKernel(Kernel):
    """The `CachedConvolution` operation; lanes are parts of one sequence, in order.

    The input of the token at position p lies in slot p modulo the number of slots.
    """

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation, arrays = run.operation(CachedConvolution), self.tools.arrays
        before = operation.width - 1
        for values, own in zip(lanes, loras, strict=True):
            x = values[operation.inputs[0]].squeeze(0)
            w, bias = ConvolutionKernel(self.tools).parameters(run, own)
            position = int(values[POSITION].item())  # type: ignore[arg-type]
            ring = values[operation.cache]
            put_in_ring(ring, x[None, None], position, arrays)
            places = np.arange(position - before, position)
            past = mx.take(ring.squeeze((0, 1)), mx.array(places % operation.slots), axis=0)
            past = past * mx.array((places >= 0)[:, None])
            y = forward(mx.concatenate([past, x]), w, bias, None, arrays)[before:]
            arrays.settle(y)
            values[operation.outputs[0]] = y[None]
