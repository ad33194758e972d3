"""The gated delta rule, a chunk of tokens at a time, and its backward by hand.

A chunk of n tokens begins with the state S (D, E). With c_t = a_1 ... a_t, E_ts = a_(s+1) ... a_t
for s <= t, and the strictly lower A_ts = b_t E_ts (k_t k_s), the rule is (Yang et al., arXiv
2412.06464, section 3.3):

    U = (I + A)^-1 R    R = diag(b) (V - diag(c) K S)    Y = diag(c) Q S + (E * Q K^T) U
    S' = c_n S + (diag(E_n) K)^T U

E is made of sums of logarithms over the tokens between, and not of differences of sums from the
chunk's beginning, which round. Arrays are shaped (K, R, n, ...): key heads, value heads of each,
tokens. The reference is `tests.oracles.delta_rule`, which goes token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import Arrays
from runtime.arrays.values import Gradients, Loras, Values
from runtime.operations.gated_delta import CHUNK, SEGMENT, CachedGatedDelta, GatedDelta
from runtime.operations.kernel import Kernel, Run, Starts, starts_of
from runtime.operations.values import COUNT, POSITION, gradient_of

Inputs = Sequence[mx.array]
"""q, k (1, T, K, D), v (1, T, H, E), log a and b (1, T, H)."""


@dataclass(frozen=True)
class DeltaRule:
    """The rule over arrays, chunk by chunk."""

    arrays: Arrays

    def forward(
        self, inputs: Inputs, starts: Starts | None = None, keeps: bool = False
    ) -> tuple[mx.array, mx.array]:
        """y (1, T, H, E), and the states (N, K, R, D, E) at which segments begin, if it `keeps`.

        starts: where each token's row starts, in a sequence of packed rows. The state before a
        row's first segment is zero, and not among them.
        """
        segments = [*_segments(inputs[0].shape[1], starts)]
        y = mx.zeros(inputs[2].shape)
        kept = mx.zeros(
            (sum(not segment.first for segment in segments) * keeps, *_state_shape(inputs))
        )
        self.arrays.settle(y, kept)
        state, at = _no_state(inputs), 0
        for segment in segments:
            if segment.first:
                state = _no_state(inputs)
            elif keeps:
                self.arrays.put(kept, at, state)
                at += 1
            for start, stop in segment.chunks:
                part, state = self.chunk(_Chunk.of(inputs, start, stop, self.arrays), state)
                self.arrays.put(y, (slice(None), slice(start, stop)), _by_token(part))
                del part
        return y, kept

    def chunk(self, chunk: _Chunk, state: mx.array) -> tuple[mx.array, mx.array]:
        """Y (K, R, n, E) of a chunk, and the state after it, evaluated."""
        _, u = self._updates(chunk, state)
        y = chunk.from_start * (chunk.q @ state) + (chunk.decays * chunk.qk) @ u
        self.arrays.settle(y)
        after = self._after(chunk, state, u)
        self.arrays.settle(after)
        return y, after

    def _updates(self, chunk: _Chunk, state: mx.array) -> tuple[mx.array, mx.array]:
        """V - diag(c) K S, and U (K, R, n, E), evaluated."""
        missed = chunk.v - chunk.from_start * (chunk.k @ state)
        u = chunk.inverse @ (chunk.beta * missed)
        self.arrays.settle(missed, u)
        return missed, u

    def _after(self, chunk: _Chunk, state: mx.array, u: mx.array) -> mx.array:
        late = (chunk.k * chunk.to_end).swapaxes(-1, -2)
        return chunk.from_start[:, :, -1:] * state + late @ u

    def backward(
        self, inputs: Inputs, kept: mx.array, dy: mx.array, starts: Starts | None = None
    ) -> list[mx.array]:
        """The gradients of the inputs, shaped as these, from what `forward` took and kept."""
        arrays = self.arrays
        whole = [mx.zeros(array.shape) for array in inputs]
        arrays.settle(whole)
        at, after = kept.shape[0], [_no_state(inputs)]  # the gradient of the state after a chunk
        for segment in reversed([*_segments(inputs[0].shape[1], starts)]):
            if segment.last:
                after = [_no_state(inputs)]
            state = _no_state(inputs)
            if not segment.first:
                at -= 1
                state = kept[at]
            states = self._states(inputs, segment, state)
            for start, stop in reversed(segment.chunks):
                chunk = _Chunk.of(inputs, start, stop, arrays)
                d_y = _by_head(dy[:, start:stop], inputs[0].shape[2])
                parts = self._chunk_backward(chunk, [states.pop(), after.pop()], d_y)
                after.append(parts.pop())
                place = (slice(None), slice(start, stop))
                for array in whole:
                    arrays.put(array, place, _by_token(parts.pop(0)).reshape(array[place].shape))
                del chunk, d_y
        return whole

    def _states(self, inputs: Inputs, segment: _Segment, state: mx.array) -> list[mx.array]:
        """The state before each chunk of a segment."""
        states = [state]
        for start, stop in segment.chunks[:-1]:
            chunk = _Chunk.of(inputs, start, stop, self.arrays)
            _, u = self._updates(chunk, states[-1])
            states.append(self._after(chunk, states[-1], u))
            self.arrays.settle(states[-1])
        return states

    def _chunk_backward(
        self, chunk: _Chunk, around: list[mx.array], dy: mx.array
    ) -> list[mx.array]:
        """The gradients of a chunk's q, k, v, log a and b (K, ?, n, ...), and of its state.

        `around` are its state, and the gradient of the one after it; it is emptied.
        """
        state, d_after = around
        around.clear()
        settle, c, beta = self.arrays.settle, chunk.from_start, chunk.beta
        missed, u = self._updates(chunk, state)
        late = chunk.k * chunk.to_end
        du = (chunk.decays * chunk.qk).swapaxes(-1, -2) @ dy + late @ d_after
        dr = chunk.inverse.swapaxes(-1, -2) @ du
        settle(dr)
        del du, late
        dv = beta * dr
        d_missed = -c * dv  # of K S
        d_weights = chunk.lower * (dy @ u.swapaxes(-1, -2)) * chunk.decays  # of Q K^T
        d_a = -chunk.strictly * (dr @ u.swapaxes(-1, -2)) * chunk.decays  # of diag(b) K K^T
        settle(dv, d_missed, d_weights, d_a)
        d_beta = (dr * missed).sum(axis=-1) + (d_a * chunk.kk).sum(axis=-1)
        settle(d_beta)
        del dr, missed
        d_a = d_a * beta
        d_pairs, d_scores = _over_heads(d_a), _over_heads(d_weights)
        of_decays = d_a * chunk.kk + d_weights * chunk.qk
        settle(d_pairs, d_scores, of_decays)
        del d_weights, d_a
        d_decay = _of_each(of_decays, chunk)
        settle(d_decay)
        del of_decays
        dq = d_scores @ chunk.k + _over_heads((c * dy) @ state.swapaxes(-1, -2))
        settle(dq)
        dk = (d_pairs + d_pairs.swapaxes(-1, -2)) @ chunk.k + d_scores.swapaxes(-1, -2) @ chunk.q
        dk = dk + _over_heads(d_missed @ state.swapaxes(-1, -2))
        settle(dk)
        del d_pairs, d_scores
        d_late = (u @ d_after.swapaxes(-1, -2)) * chunk.to_end
        dk = dk + _over_heads(d_late)
        of_late = (d_late * chunk.k).sum(axis=-1)
        of_start = c[..., 0] * (dy * (chunk.q @ state)).sum(axis=-1)
        of_start = of_start + (d_missed * (chunk.k @ state)).sum(axis=-1)
        settle(dk, of_late, of_start)
        del d_late, u
        at_end = c[:, :, -1] * (state * d_after).sum(axis=(-1, -2))[..., None]
        of_start = mx.cumsum(of_start, axis=-1, reverse=True)
        of_late = mx.cumsum(of_late, axis=-1, inclusive=False)
        d_decay = d_decay + of_start + of_late + at_end
        settle(d_decay)
        d_state = c[:, :, -1:] * d_after
        settle(d_state)
        del state, d_after
        self.arrays.add_to(d_state, ..., chunk.q.swapaxes(-1, -2) @ (c * dy))
        self.arrays.add_to(d_state, ..., chunk.k.swapaxes(-1, -2) @ d_missed)
        return [dq, dk, dv, d_decay[..., None], d_beta[..., None], d_state]


@dataclass(frozen=True)
class _Segment:
    """Chunks of one row; whether it is the row's first segment, and whether its last."""

    chunks: list[tuple[int, int]]
    first: bool
    last: bool


def _segments(tokens: int, starts: Starts | None) -> Iterator[_Segment]:
    """The segments of a sequence in order; each row begins one."""
    begins = [0] if starts is None else np.unique(starts).tolist()
    for begin, end in zip(begins, [*begins[1:], tokens], strict=True):
        chunks = [(at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK)]
        for at in range(0, len(chunks), SEGMENT):
            yield _Segment(chunks[at : at + SEGMENT], at == 0, at + SEGMENT >= len(chunks))


def _state_shape(inputs: Inputs) -> tuple[int, int, int, int]:
    _, _, groups, width = inputs[0].shape
    _, _, heads, value_width = inputs[2].shape
    return groups, heads // groups, width, value_width


def _no_state(inputs: Inputs) -> mx.array:
    return mx.zeros(_state_shape(inputs))


def _by_head(x: mx.array, groups: int) -> mx.array:
    """(K, R, n, ...) of (1, n, K R, ...)."""
    _, tokens, heads, *rest = x.shape
    return mx.contiguous(mx.moveaxis(x.reshape(tokens, groups, heads // groups, *rest), 0, 2))


def _by_token(x: mx.array) -> mx.array:
    """(1, n, K R, ...) of (K, R, n, ...)."""
    groups, repeats, tokens, *rest = x.shape
    return mx.moveaxis(x, 2, 0).reshape(1, tokens, groups * repeats, *rest)


def _of_each(of_decays: mx.array, chunk: _Chunk) -> mx.array:
    """The gradient of log a_r (K, R, n) from those of log E_ts, which log a_r is in if s < r <= t.

    It is their sum. Sums over rows less those over columns would be it too, but round at the
    largest of all pairs, where strong decays leave little of those that are apart.
    """
    return (of_decays @ chunk.strictly.T * chunk.lower).sum(axis=-2)


def _over_heads(x: mx.array) -> mx.array:
    """The sum over the value heads of each key head, (K, 1, n, D)."""
    return x if x.shape[1] == 1 else x.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class _Chunk:
    """A chunk's inputs, and what follows from them without the state.

    from_start: c (K, R, n, 1).  to_end: E_n (K, R, n, 1).  decays: E (K, R, n, n).  qk, kk: Q K^T
    and K K^T (K, 1, n, n).  inverse: (I + A)^-1 (K, R, n, n).
    """

    q: mx.array
    k: mx.array
    v: mx.array
    beta: mx.array
    from_start: mx.array
    to_end: mx.array
    decays: mx.array
    qk: mx.array
    kk: mx.array
    inverse: mx.array
    lower: mx.array  # (n, n), 1 up to the diagonal
    strictly: mx.array  # (n, n), 1 below the diagonal

    @classmethod
    def of(cls, inputs: Inputs, start: int, stop: int, arrays: Arrays) -> _Chunk:
        groups = inputs[0].shape[2]
        q, k, v, decay, beta = (_by_head(array[:, start:stop], groups) for array in inputs)
        beta = beta[..., None]
        tokens = stop - start
        lower, strictly = (mx.array(np.tri(tokens, k=at, dtype=np.float32)) for at in (0, -1))
        from_start = mx.exp(mx.cumsum(decay, axis=-1))[..., None]
        between = mx.cumsum(decay[..., None] * strictly, axis=-2)  # (K, R, n, n)
        arrays.settle(q, k, v, beta, from_start, between)
        decays = arrays.exp_below(between, mx.zeros((1,))) * lower
        qk, kk = (x @ k.swapaxes(-1, -2) for x in (q, k))
        arrays.settle(decays, qk, kk)
        del between
        inverse = _inverse(beta * decays * kk * strictly)
        to_end = decays[:, :, -1, :, None]
        arrays.settle(inverse, to_end)
        return cls(q, k, v, beta, from_start, to_end, decays, qk, kk, inverse, lower, strictly)


def _inverse(a: mx.array) -> mx.array:
    """(I + A)^-1 of strictly lower matrices A (..., n, n), by blocks of twice the size each time.

    Of [[P, 0], [B, Q]] it is [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]], so that nothing grows that cancels
    later, as in a sum of powers of A.
    """
    tokens = a.shape[-1]
    size = 1 << (tokens - 1).bit_length()
    before = a.shape[:-2]
    if size > tokens:
        a = mx.pad(a, [*[(0, 0)] * len(before), (0, size - tokens), (0, size - tokens)])
    blocks = mx.ones((*before, size, 1, 1))  # the inverses on the diagonal
    width = 1
    while width < size:
        pairs = size // (2 * width)
        tiles = a.reshape(*before, pairs, 2, width, pairs, 2, width)[..., 1, :, :, 0, :]
        below = mx.moveaxis(mx.diagonal(tiles, axis1=-4, axis2=-2), -1, -3)
        halves = blocks.reshape(*before, pairs, 2, width, width)
        first, second = halves[..., 0, :, :], halves[..., 1, :, :]
        corner = -(second @ below @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        blocks = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return blocks[..., 0, :tokens, :tokens]


class GatedDeltaKernel(Kernel):
    """The `GatedDelta` operation, its states, and their backward."""

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation, rule = run.operation(GatedDelta), DeltaRule(self.tools.arrays)
        statistics = run.instruction.statistics
        for values in lanes:
            inputs = [values[name] for name in operation.inputs]
            y, states = rule.forward(inputs, starts_of(values), bool(statistics))
            values[operation.outputs[0]] = y
            for name in statistics:
                values[name] = states

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation, rule = run.operation(GatedDelta), DeltaRule(self.tools.arrays)
        (statistic,), (output,) = operation.statistics, operation.outputs
        inputs = [values[name] for name in operation.inputs]
        dy = values[gradient_of(output)]
        slopes = rule.backward(inputs, values[statistic], dy, starts_of(values))
        return dict(zip(operation.inputs, slopes, strict=True))


class CachedGatedDeltaKernel(Kernel):
    """The `CachedGatedDelta` operation; lanes are parts of one sequence, in order.

    Padding does not change the state.
    """

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation, arrays = run.operation(CachedGatedDelta), self.tools.arrays
        for values in lanes:
            inputs = [values[name] for name in operation.inputs]
            position, count = (int(values[name].item()) for name in (POSITION, COUNT))  # type: ignore[arg-type]
            cache = values[operation.cache]
            state = cache if position else mx.zeros(cache.shape)
            part, state = DeltaRule(arrays).chunk(_Chunk.of(inputs, 0, count, arrays), state)
            arrays.put(cache, ..., state)
            y = mx.zeros(inputs[2].shape)
            arrays.settle(y)
            arrays.put(y, (slice(None), slice(0, count)), _by_token(part))
            values[operation.outputs[0]] = y
