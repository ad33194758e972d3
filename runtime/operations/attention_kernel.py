"""Causal attention, a block of queries at a time, and its backward by hand.

It knows windows, packed rows and grouped keys.

Never more than one block of scores (H, block, keys) exists. The forward keeps the log-sum-exp of
each row; the backward rebuilds the probabilities from it (as FlashAttention, arXiv 2205.14135):

    P = exp(S - lse)   dV = P^T dO   dS = P * (dO V^T - rowsum(dO * O)) * scale
    dQ = dS K          dK = dS^T Q

Where scores are capped, S = c tanh(q k^T scale / c), dS is multiplied by 1 - (S / c)^2.

A block of queries is multiplied by no keys before its window or before the row of its first query.
Where the plan multiplies weights by compiled code, attention is compiled too, for all that this
file knows (`runtime.arrays.compiled_attention`).
The reference is `tests.oracles.whole_model.attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from runtime.arrays.arrays import Arrays, row_sums, view
from runtime.arrays.attention_text import UNSEEN
from runtime.arrays.compiled_attention import Seen, attend, attend_back, compile_for
from runtime.arrays.values import Gradients, Loras, Values, accumulate
from runtime.machine.threads import Team
from runtime.operations.attention import Attention
from runtime.operations.base import Operation
from runtime.operations.kernel import Kernel, Run, Starts
from runtime.operations.prefix_kernel import (
    MASKED,
    Scoring,
    attended,
    by_head,
    prefix_rows,
    transposed,
    watch_keys,
)


@dataclass(frozen=True)
class AttentionBlocks:
    """Attention over arrays, `attention_block` rows of scores at a time."""

    attention_block: int
    arrays: Arrays

    def _blocks(self, tokens: int, scoring: Scoring) -> Iterator[tuple[int, int, int, mx.array]]:
        window, starts = scoring.window, scoring.starts
        for start in range(0, tokens, self.attention_block):
            stop = min(tokens, start + self.attention_block)
            first = 0 if window is None else max(0, start - window + 1)
            if starts is not None:
                first = max(first, int(starts[start]))
            yield start, stop, first, _mask(start, stop, first, window, starts)

    def forward(
        self, q: mx.array, k: mx.array, v: mx.array, scoring: Scoring
    ) -> tuple[mx.array, mx.array]:
        """Attend.

        Args:
            q: (1, H, T, D); k, v: (1, K, T, D) with H a multiple of K.
        Returns:
            out (1, H, T, D) and the log-sum-exp of every row of scores (K, H/K, T, 1).
        """
        arrays = self.arrays
        _, heads, tokens, width = q.shape
        groups = k.shape[1]
        grouped = q.reshape(groups, heads // groups, tokens, width)
        joined, sums = _Joined(tokens, arrays), _Joined(tokens, arrays)
        for start, stop, first, mask in self._blocks(tokens, scoring):
            keys, values = k[0, :, None, first:stop], v[0, :, None, first:stop]
            out, lse = attended(grouped[:, :, start:stop], keys, values, mask, scoring, arrays)
            joined.put(start, out)
            sums.put(start, lse)
            del out, lse
        return joined.whole.reshape(1, heads, tokens, v.shape[-1]), sums.whole

    def backward(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        out: mx.array,
        lse: mx.array,
        d_out: mx.array,
        scoring: Scoring,
    ) -> tuple[mx.array, ...]:
        """dq, dk, dv, shaped as q, k, v, from what `forward` took and returned.

        Of a prefix, dK (K, m, D) and dV (K, m, E) follow.
        """
        arrays, prefix, cap = self.arrays, scoring.prefix, scoring.cap
        _, heads, tokens, width = q.shape
        groups = k.shape[1]
        repeats = heads // groups
        grouped = q.reshape(groups, repeats, tokens, width)
        d_grouped = d_out.reshape(groups, repeats, tokens, -1)
        outputs = out.reshape(d_grouped.shape)
        dk, dv = mx.zeros(k.shape[1:]), mx.zeros(v.shape[1:])
        arrays.settle(dk, dv)
        further: list[mx.array] = []
        if prefix is not None:
            further = [mx.zeros(part[:, 0].shape) for part in (prefix.keys, prefix.values)]
            arrays.settle(further)
        joined = _Joined(tokens, arrays)
        for start, stop, first, mask in self._blocks(tokens, scoring):
            keys, values = k[0, :, None, first:stop], v[0, :, None, first:stop]
            rows = grouped[:, :, start:stop]
            d_rows = d_grouped[:, :, start:stop]
            inner = row_sums(d_rows * outputs[:, :, start:stop])
            arrays.settle(inner)
            s = scoring.scores(rows, keys, arrays)
            slope = None if cap is None else arrays.cap_slope(s, cap)
            arrays.add_to(s, ..., mask)
            p = arrays.exp_below(s, lse[:, :, start:stop])
            del s
            arrays.add_to(dv, (slice(None), slice(first, stop)), transposed(p, d_rows))
            dp = by_head(d_rows, values.swapaxes(-1, -2))
            arrays.settle(dp)
            ds = arrays.weighed(dp, inner, p, scoring.scale)
            if slope is not None:
                ds = arrays.times(ds, slope)
            del p, dp, slope
            dq = by_head(ds, keys)
            arrays.add_to(dk, (slice(None), slice(first, stop)), transposed(ds, rows))
            arrays.settle(dq)
            del ds
            if prefix is not None:
                sums = lse[:, :, start:stop]
                part, *d_prefix = prefix.backward(rows, sums, inner, d_rows, scoring)
                dq = dq + part
                arrays.settle(dq)
                for whole, gradient in zip(further, d_prefix, strict=True):
                    arrays.add_to(whole, ..., gradient)
                del part, d_prefix
            joined.put(start, dq)
            del dq
        return joined.whole.reshape(q.shape), dk[None], dv[None], *further


@dataclass(frozen=True)
class CompiledBlocks:
    """The same by compiled code, in all threads."""

    team: Team
    arrays: Arrays

    def forward(
        self, q: mx.array, k: mx.array, v: mx.array, scoring: Scoring
    ) -> tuple[mx.array, mx.array]:
        """As `AttentionBlocks.forward`."""
        _, heads, tokens, _ = q.shape
        groups = k.shape[1]
        out = mx.zeros((1, heads, tokens, v.shape[-1]))
        sums = mx.zeros((groups, heads // groups, tokens, 1))
        self.arrays.settle(out, sums)
        total = view(sums).reshape(heads, tokens)
        top = np.full((heads, tokens), UNSEEN, np.float32)
        if scoring.sinks is not None:
            top[...], total[...] = view(scoring.sinks)[:, None], 1
        given = {"q": view(q)[0], "k": view(k)[0], "v": view(v)[0], "out": view(out)[0]}
        attend(self.team, _seen(scoring, tokens), given, top, total)
        return out, sums

    def backward(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        out: mx.array,
        lse: mx.array,
        d_out: mx.array,
        scoring: Scoring,
    ) -> tuple[mx.array, ...]:
        """As `AttentionBlocks.backward`."""
        _, heads, tokens, _ = q.shape
        made = [mx.zeros(part.shape) for part in (q, k, v)]
        prefix, further = scoring.prefix, list[mx.array]()
        if prefix is not None:
            further = [mx.zeros(part[:, 0].shape) for part in (prefix.keys, prefix.values)]
        self.arrays.settle(made, further)
        names = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
        arrays = (view(part)[0] for part in (q, k, v, out, d_out, *made))
        given = dict(zip(names, arrays, strict=True))
        sums = view(lse).reshape(heads, tokens)
        d_prefix = tuple(map(view, further))
        attend_back(self.team, _seen(scoring, tokens), given, sums, d_prefix)
        return *made, *further


def _seen(scoring: Scoring, tokens: int) -> Seen:
    """What each token sees: from its window's or its row's first token on, and a prefix."""
    window = tokens if scoring.window is None else scoring.window
    lows = np.maximum(np.arange(1 - window, tokens - window + 1, dtype=np.int32), 0)
    if scoring.starts is not None:
        lows = np.maximum(lows, scoring.starts)
    further: tuple[mx.array, ...] = ()
    if scoring.prefix is not None:
        further = scoring.prefix.keys, scoring.prefix.values
    return Seen(scoring.scale, lows, scoring.cap, tuple(view(part)[:, 0] for part in further))


@dataclass
class _Joined:
    """Results (K, R, t, n) of blocks of queries, each written at once to its place among all.

    If they stayed in memory until the last one, they would lie between the scores that are
    allocated and freed around them.
    """

    tokens: int
    arrays: Arrays
    whole: mx.array = field(default_factory=lambda: mx.array(0.0))

    def put(self, start: int, part: mx.array) -> None:
        groups, repeats, rows, width = part.shape
        if rows == self.tokens:
            self.whole = part
            return
        if start == 0:
            self.whole = mx.zeros((groups, repeats, self.tokens, width))
            self.arrays.settle(self.whole)
        self.arrays.put(self.whole, (slice(None), slice(None), slice(start, start + rows)), part)


def _mask(start: int, stop: int, first: int, window: int | None, starts: Starts | None) -> mx.array:
    """The mask, added to the scores of queries start:stop with keys first:stop."""
    rows, columns = np.arange(start, stop)[:, None], np.arange(first, stop)[None]
    masked = columns > rows
    if window is not None:
        masked |= columns <= rows - window
    if starts is not None:
        masked |= columns < starts[start:stop, None]
    return mx.array(masked * np.float32(MASKED))


def prepare(operations: Iterable[Operation]) -> None:
    """Compile what attention takes, if any of these operations is one."""
    compile_for(each.cap for each in operations if isinstance(each, Attention))


class AttentionKernel(Kernel):
    """The `Attention` operation: its output, the log-sum-exp of each row, and their backward."""

    @property
    def blocks(self) -> AttentionBlocks | CompiledBlocks:
        team = self.tools.matrices.team
        if team is not None:
            return CompiledBlocks(team, self.tools.arrays)
        return AttentionBlocks(self.tools.execution.attention_block, self.tools.arrays)

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation = run.operation(Attention)
        for values, own in zip(lanes, loras, strict=True):
            q, k, v = (values[name] for name in operation.inputs)
            watch_keys(own, operation.prefix, k, v, self.tools.arrays)
            scoring = Scoring.of(self.tools, run, values, own)
            out, sums = self.blocks.forward(q, k, v, scoring)
            self.tools.arrays.settle(out, sums)
            values[operation.outputs[0]] = out
            for name in run.instruction.statistics:
                values[name] = sums

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation = run.operation(Attention)
        q, k, v = (values[name] for name in operation.inputs)
        (output,), (statistic,) = operation.outputs, operation.statistics
        arrays = self.tools.arrays
        scoring = Scoring.of(self.tools, run, values, loras)
        results = (values[output], values[statistic], values[f"~{output}"])
        dq, dk, dv, *further = self.blocks.backward(q, k, v, *results, scoring)
        if further:
            d_keys, d_values = (prefix_rows(part, arrays) for part in further)
            accumulate(gradients, {operation.prefix: (d_keys, d_values)}, arrays)
        return dict(zip(operation.inputs, (dq, dk, dv), strict=True))
