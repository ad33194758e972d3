"""Causal filters, a tile of tokens at a time, and their backward by hand.

The gradient of x is the same filter in the other direction:

    dx_t = sum over j of w[:, width - 1 - j] * dy_(t + j)

A product of two tokens counts only if they are of one row. The filters are frozen. The reference is
`tests.oracles.whole_model.convolution`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import Arrays
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.attention_kernel import Starts, starts_of
from runtime.operations.cached_attention_kernel import put_in_ring
from runtime.operations.convolution import CachedConvolution, Convolution, tile_tokens
from runtime.operations.kernel import Run, Tools
from runtime.operations.values import POSITION, gradient_of


def forward(
    x: mx.array, w: mx.array, bias: mx.array | None, starts: Starts | None, arrays: Arrays
) -> mx.array:
    """y (T, C), evaluated, of x (T, C) and w (C, width, 1).

    starts: where each token's row starts, in a sequence of packed rows.
    """
    reach = None if starts is None else np.arange(len(starts)) - starts

    def tile(start: int, stop: int) -> mx.array:
        y = None
        for back, factor in enumerate(_taps(w)):
            part = _rows(x, start - back, stop - back) * factor
            if reach is not None and back:
                part = part * mx.array((reach[start:stop] >= back)[:, None])
            y = part if y is None else y + part
        assert y is not None
        return y if bias is None else y + bias

    return _tiled(x, tile, arrays)


def backward(dy: mx.array, w: mx.array, starts: Starts | None, arrays: Arrays) -> mx.array:
    """dx (T, C), evaluated, from dy (T, C)."""
    tokens = dy.shape[0]
    reach = np.arange(tokens) - (np.zeros(tokens) if starts is None else starts)
    reach = np.pad(reach, (0, w.shape[1]))  # no token behind the last one reaches back

    def tile(start: int, stop: int) -> mx.array:
        dx = None
        for ahead, factor in enumerate(_taps(w)):
            part = _rows(dy, start + ahead, stop + ahead) * factor
            if starts is not None and ahead:
                part = part * mx.array((reach[start + ahead : stop + ahead] >= ahead)[:, None])
            dx = part if dx is None else dx + part
        assert dx is not None
        return dx

    return _tiled(dy, tile, arrays)


def _taps(w: mx.array) -> list[mx.array]:
    """The filters' factors (C,): of the token itself, of the one before, and so on."""
    return [w[:, at, 0] for at in reversed(range(w.shape[1]))]


def _rows(x: mx.array, start: int, stop: int) -> mx.array:
    """Rows start:stop of x (T, C), with zeros where there are none."""
    tokens = x.shape[0]
    outside = min(max(-start, 0), stop - start), min(max(stop - tokens, 0), stop - start)
    inside = x[max(start, 0) : max(min(stop, tokens), 0)]
    return mx.pad(inside, [outside, (0, 0)]) if any(outside) else inside


def _tiled(x: mx.array, tile: Callable[[int, int], mx.array], arrays: Arrays) -> mx.array:
    """The tiles of tokens, each evaluated before the next, as an array of the shape of x."""
    tokens, channels = x.shape
    step = tile_tokens(channels)
    if tokens <= step:
        whole = tile(0, tokens)
        arrays.settle(whole)
        return whole
    whole = mx.zeros(x.shape)
    arrays.settle(whole)
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        part = tile(start, stop)
        arrays.settle(part)
        arrays.put(whole, slice(start, stop), part)
    return whole


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
        w, *bias = (self.tools.vector(run.block.tensor(name[1:]), loras) for name in names)
        return w, bias[0] if bias else None


@dataclass(frozen=True)
class CachedConvolutionKernel:
    """The `CachedConvolution` operation; lanes are parts of one sequence, in order.

    The input of the token at position p lies in slot p modulo the number of slots.
    """

    tools: Tools

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

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        raise AssertionError("what decodes is not trained")
