"""Causal filters, one factor after another, and their backward by hand.

The gradient of x is the same filter in the other direction:

    dx_t = sum over j of w[:, width - 1 - j] * dy_(t + j)

Each of the rows of a sequence is filtered by itself. The filters are frozen. The reference is
`tests.oracles.whole_model.convolution`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import Arrays
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.attention_kernel import Starts, starts_of
from runtime.operations.cached_attention_kernel import put_in_ring
from runtime.operations.convolution import CachedConvolution, Convolution
from runtime.operations.kernel import ForwardKernel, Run, Tools
from runtime.operations.values import POSITION, gradient_of


def forward(
    x: mx.array, w: mx.array, bias: mx.array | None, starts: Starts | None, arrays: Arrays
) -> mx.array:
    """y (T, C), evaluated, of x (T, C) and w (C, width, 1).

    starts: where each token's row starts, in a sequence of packed rows.
    """
    y = mx.zeros(x.shape) if bias is None else mx.zeros(x.shape) + bias
    arrays.settle(y)
    factors = _factors(w, arrays)
    for begin, end in _rows(x, starts):
        for back, factor in enumerate(factors):
            if back < end - begin:
                later, earlier = slice(begin + back, end), slice(begin, end - back)
                arrays.add_product(y, later, x, earlier, factor)
    return y


def backward(dy: mx.array, w: mx.array, starts: Starts | None, arrays: Arrays) -> mx.array:
    """dx (T, C), evaluated, from dy (T, C)."""
    dx = mx.zeros(dy.shape)
    arrays.settle(dx)
    factors = _factors(w, arrays)
    for begin, end in _rows(dy, starts):
        for back, factor in enumerate(factors):
            if back < end - begin:
                later, earlier = slice(begin + back, end), slice(begin, end - back)
                arrays.add_product(dx, earlier, dy, later, factor)
    return dx


def _factors(w: mx.array, arrays: Arrays) -> list[mx.array]:
    """The filters' factors (C,): of the token itself, of the one before, and so on."""
    factors = [mx.contiguous(w[:, at, 0]) for at in reversed(range(w.shape[1]))]
    arrays.settle(factors)
    return factors


def _rows(x: mx.array, starts: Starts | None) -> Iterator[tuple[int, int]]:
    """The first token of each row, and the one after its last."""
    begins = [0] if starts is None else np.unique(starts).tolist()
    return zip(begins, [*begins[1:], x.shape[0]], strict=True)


@dataclass(frozen=True)
class ConvolutionKernel:
    """The `Convolution` operation, and its backward."""

    tools: Tools

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


class CachedConvolutionKernel(ForwardKernel):
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
