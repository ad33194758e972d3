"""Attention of a few queries, and what they see besides the keys of a sequence.

That are the trained keys and values of a prefix (Li & Liang), and a sink: a score of each head that
has no value (arXiv 2309.17453, as gpt-oss learns it). Their scores are kept apart from those of the
sequence, and meet them in the softmax's maximum and sum, so that no key or value is copied:

    out = (e^(S - top) V + e^(S' - top) V') / (sum e^(S - top) + sum e^(S' - top) + e^(sink - top))

with S' = q K'^T scale of the prefix's keys K' (m, K D) and values V' (m, K E) in float32. They lie
behind the rotary embedding, so they have no position, and no mask hides them. A backward that
rebuilds probabilities from the log-sum-exp of all these scores needs to know of no sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from runtime.arrays.arrays import Arrays, row_sums
from runtime.arrays.values import Lora, Loras, Values
from runtime.operations.attention import Attention
from runtime.operations.kernel import Run, Starts, Tools, starts_of

MASKED = -1e30  # added to a score, which vanishes in its rounding


@dataclass(frozen=True)
class Prefix:
    """Keys (K, 1, m, D) and values (K, 1, m, E), by key head."""

    keys: mx.array
    values: mx.array
    arrays: Arrays

    @classmethod
    def of(cls, lora: Lora | None, heads: int, arrays: Arrays) -> Prefix | None:
        """The prefix in an adapter of an attention with so many key heads; None if it has none."""
        if lora is None or not lora.a.shape[0]:
            return None
        keys, values = (
            mx.contiguous(part.reshape(part.shape[0], heads, 1, -1).transpose(1, 2, 0, 3))
            for part in (lora.a, lora.b)
        )
        arrays.settle(keys, values)
        return cls(keys, values, arrays)

    def output(self, p: mx.array) -> mx.array:
        """p V' (K, R, t, E) of probabilities, or what is in proportion to them, p (K, R, t, m)."""
        return by_head(p, self.values)

    def backward(
        self, q: mx.array, lse: mx.array, inner: mx.array, d_out: mx.array, scoring: Scoring
    ) -> tuple[mx.array, mx.array, mx.array]:
        """dq (K, R, t, D), dK' (K, m, D) and dV' (K, m, E), evaluated, as those of the sequence.

        `lse` (K, R, t, 1) is the log-sum-exp over all keys, `inner` rowsum(dO * O).
        """
        scores, cap = scoring.scores(q, self.keys, self.arrays), scoring.cap
        slope = None if cap is None else self.arrays.cap_slope(scores, cap)
        p = self.arrays.exp_below(scores, lse)
        del scores
        d_values = transposed(p, d_out)
        dp = by_head(d_out, self.values.swapaxes(-1, -2))
        self.arrays.settle(d_values, dp)
        ds = self.arrays.weighed(dp, inner, p, scoring.scale)
        if slope is not None:
            ds = self.arrays.times(ds, slope)
        dq, d_keys = by_head(ds, self.keys), transposed(ds, q)
        self.arrays.settle(dq, d_keys)
        return dq, d_keys, d_values


class Scoring(NamedTuple):
    """How queries score keys, and what they see besides those of the sequence.

    window: how many tokens a query sees, itself the last; None for all. prefix: further keys and
    values, which all queries see. cap: of the scores. sinks: a further score (H,) of each head,
    which has no value. starts: where each token's row starts, in a sequence of packed rows.
    """

    scale: float
    window: int | None = None
    prefix: Prefix | None = None
    cap: float | None = None
    sinks: mx.array | None = None
    starts: Starts | None = None

    @classmethod
    def of(cls, tools: Tools, run: Run, values: Values, loras: Loras) -> Scoring:
        """That of a batch lane at an attention."""
        operation = run.operation(Attention)
        heads = values[operation.inputs[1]].shape[1]
        prefix = Prefix.of(loras.get(operation.prefix), heads, tools.arrays)
        sinks = None
        if operation.sinks:
            sinks = tools.argument(run.block, operation.sinks, values, loras)
        how = operation.scale, operation.window, prefix, operation.cap
        return cls(*how, sinks, starts_of(values))

    def scores(self, q: mx.array, k: mx.array, arrays: Arrays) -> mx.array:
        """The scores (K, R, t, n) of queries (K, R, t, D) with keys (K, 1, n, D), evaluated."""
        scores = by_head(q * self.scale, k.swapaxes(-1, -2))
        arrays.settle(scores)
        return scores if self.cap is None else arrays.capped(scores, self.cap)


def attended(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None,
    scoring: Scoring,
    arrays: Arrays,
) -> tuple[mx.array, mx.array]:
    """The output (K, R, t, E) and the log-sum-exp of scores (K, R, t, 1), evaluated.

    Args:
        q: (K, R, t, D), by key head; k: (K, 1, n, D); v: (K, 1, n, E).
        mask: (t, n), added to the scores of these keys.
    """
    prefix, sinks = scoring.prefix, scoring.sinks
    s = scoring.scores(q, k, arrays)
    if mask is not None:
        arrays.add_to(s, ..., mask)
    top = arrays.row_max(s)
    if prefix is not None:
        further = scoring.scores(q, prefix.keys, arrays)
        top = mx.maximum(top, arrays.row_max(further))
    if sinks is not None:
        sinks = sinks.reshape(q.shape[0], -1, 1, 1)
        top = mx.maximum(top, sinks)
    arrays.settle(top)
    p = arrays.exp_below(s, top)
    total, out = row_sums(p), by_head(p, v)
    if prefix is not None:
        weights = arrays.exp_below(further, top)
        total, out = total + row_sums(weights), out + prefix.output(weights)
        arrays.settle(total, out)
        del further, weights
    if sinks is not None:
        total = total + mx.exp(sinks - top)
    out, lse = out / total, top + mx.log(total)
    del s, p
    arrays.settle(out, lse)
    return out, lse


def prefix_rows(by_head: mx.array, arrays: Arrays) -> mx.array:
    """(m, K D) of (K, m, D), as adapters hold it, evaluated."""
    rows = mx.contiguous(by_head.swapaxes(0, 1).reshape(by_head.shape[1], -1))
    arrays.settle(rows)
    return rows


def watch_keys(loras: Loras, name: str, k: mx.array, v: mx.array, arrays: Arrays) -> None:
    """Show keys and values (1, K, T, D) of a sequence, as rows (T, K D + K E), to who watches."""
    lora = loras.get(name)
    if lora is None or lora.observer is None:
        return
    seen = [part[0, :, : lora.observer.tokens] for part in (k, v)]
    lora.observer(mx.concatenate([prefix_rows(part, arrays) for part in seen], axis=-1))


def by_head(x: mx.array, y: mx.array) -> mx.array:
    """x (K, R, t, n) times y (K, 1, n, m), one product per key head: (K, R, t, m)."""
    groups, repeats, rows, inner = x.shape
    flat = x.reshape(groups, repeats * rows, inner) @ y[:, 0]
    return flat.reshape(groups, repeats, rows, -1)


def transposed(x: mx.array, y: mx.array) -> mx.array:
    """Sum over heads of a group and rows of x (K, R, t, n)^T y (K, R, t, m): (K, n, m)."""
    groups, repeats, rows, _ = x.shape
    left = x.reshape(groups, repeats * rows, -1)
    return left.swapaxes(-1, -2) @ y.reshape(groups, repeats * rows, -1)
