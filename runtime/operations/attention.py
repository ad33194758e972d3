"""The operation Attention: causal, optionally with a sliding window, with grouped heads.

Where a sequence holds several packed rows, attention does not cross from one to another. Positions
go on from row to row: rotary position embeddings make scores depend on distances only, and windows
count distances too.

Prefix tuning gives it further keys and values, which every token sees, whatever its row, its
position and the window.

For decoding the lowering replaces it by `CachedAttention`, to new tokens and to a key-value cache.
The cache is a ring: the key of the token at position p lies in slot p modulo the number of slots.
So a layer with a window keeps no more tokens than its window, and a chunk of a prompt besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from runtime.arrays.attention_scratch import scratch_values
from runtime.arrays.stored import pages
from runtime.operations.base import Call, Function, Operation, Scope, require
from runtime.operations.execution import Execution
from runtime.operations.logits import check_cap
from runtime.operations.values import CHUNK_TOKENS, F32, HUGE, Shape, T, is_parameter, shape_at

STARTS = "@starts"  # the value that packed sequences have besides (no program can name it so)
START_BYTES = 4  # of each token's: the position at which its row starts


def slots_of(context: int, window: int | None) -> int:
    """How many tokens' keys a cache holds for a context of so many tokens.

    A chunk that begins within the context may end beyond it, since the last chunk of a prompt is
    padded; and while its last token is written, its first one still reads its whole window.
    """
    seen = context if window is None else min(context, window)
    return seen + CHUNK_TOKENS - 1


def prefix_bytes(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    queries: int,
    rows: int,
    back: bool,
    capped: bool,
) -> int:
    """Bytes that a prefix of so many rows takes while so many queries attend to it.

    These are the scores and probabilities, in the backward their gradients and the slopes of a cap,
    the prefix's part of the output or to the gradient of the queries, and the prefix by heads, with
    its gradient.
    """
    if not rows:
        return 0
    scores = q[1] * queries * rows * (4 + capped if back else 2)
    added = q[1] * queries * max(q[3], v[3])
    held = rows * (k[1] * k[3] + v[1] * v[3]) * (3 if back else 1)
    return (scores + added + held) * F32


class Attention(Function, frozen=True):
    """softmax(q k^T scale) v for q (1, H, T, D) and k, v (1, K, T, D), H a multiple of K.

    A token attends to itself and to earlier tokens of its row; with `window`, to the last `window`
    of these. With `cap` the scores are cap tanh(q k^T scale / cap). k and v are those of the
    attention of this name in the block `cache_of`, if one is named. `sinks` is a parameter (H,), a
    further score of each head without a value, or empty.
    """

    inputs: tuple[str, str, str]
    outputs: tuple[str]
    scale: float
    window: int | None = None
    cap: float | None = None
    cache_of: str = ""
    sinks: str = ""

    takes_parameters: ClassVar[bool] = True
    by_queries: ClassVar[bool] = True

    @property
    def inputs_read(self) -> tuple[str, ...]:
        return (*self.inputs, self.sinks) if self.sinks else self.inputs

    @property
    def prefix(self) -> str:
        """The name of its prefix, relative to the block."""
        return self.outputs[0].removesuffix(".out")

    @property
    def prefixable(self) -> tuple[str, ...]:
        return (self.prefix,)

    def prefix_widths(self, values: Mapping[str, Shape]) -> tuple[int, int]:
        _, k, v = (values[name] for name in self.inputs)
        return int(k[1]) * int(k[3]), int(v[1]) * int(v[3])

    def learned_results(self, adapted: frozenset[str]) -> tuple[str, ...]:
        return self.outputs if self.learns(adapted) else ()

    @property
    def statistics(self) -> tuple[str, ...]:
        """The log-sum-exp of each row of scores, from which the backward rebuilds them."""
        return (f"{self.outputs[0]}.lse",)

    def decoding(self, context: int) -> Operation:
        """`CachedAttention`: to the past tokens too.

        A window has a ring of its own: the other block's has gone on to later chunks by then.
        """
        of = self.cache_of if self.window is None else ""
        own = (self.inputs, self.outputs, self.scale, self.window, self.cap, of, self.sinks)
        return CachedAttention(*own, slots=slots_of(context, self.window))

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset((*self.inputs, *self.outputs, *self.statistics))

    def statistic_bytes(self, name: str, call: Call) -> int:
        return math.prod(shape_at(call.values[self.outputs[0]], call.tokens)[:-1]) * F32

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """A block of scores, its mask and probabilities, and a copied block of keys or values."""
        if execution.compiled:
            return self._compiled_bytes(call, execution)
        q, k, v = (shape_at(call.values[name], execution.bucket) for name in self.inputs)
        heads, tokens = q[1], q[2]
        block = min(tokens, execution.attention_block)
        keys = tokens if self.window is None else min(tokens, self.window + block)
        mask = block * keys * F32
        scores = heads * mask
        query_bytes, key_value_bytes = math.prod(q) * F32, (math.prod(k) + math.prod(v)) * F32
        part = query_bytes * block // tokens
        nbytes = mask + scores + part + key_value_bytes // 2
        slopes = 0 if self.cap is None else scores
        nbytes = nbytes + max(scores, part) + slopes if call.backward else nbytes
        capped, back = self.cap is not None, call.backward
        return nbytes + prefix_bytes(q, k, v, block, execution.prefix, back, capped)

    def _compiled_bytes(self, call: Call, execution: Execution) -> int:
        """Two numbers for each row of scores, one for each token, and every thread's scratch.

        Scores are those of a tile. A prefix lies in memory by heads.
        """
        q, k, v = (shape_at(call.values[name], execution.bucket) for name in self.inputs)
        rows = (2 * q[1] + 1) * q[2] * F32
        scratch = scratch_values(q[3], v[3], call.backward) * F32
        prefix = prefix_bytes(q, k, v, 0, execution.prefix, call.backward, self.cap is not None)
        return rows + execution.threads * scratch + prefix

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """The arrays of every block of queries; scores are replaced in place by what follows them.

        Forward two arrays as large as a block's scores, backward four: the probabilities and their
        gradients, each beside what it follows from; capping takes three more, and its slopes four.
        """
        q, k, v, out = (
            shape_at(call.values[name], call.tokens) for name in (*self.inputs, *self.outputs)
        )
        whole = sum(pages(math.prod(shape) * F32) for shape in (q, out, out))
        for start in range(0, call.tokens, execution.attention_block):
            rows = min(call.tokens, start + execution.attention_block) - start
            first = 0 if self.window is None else max(0, start - self.window + 1)
            keys = start + rows - first
            mask, scores = (pages(n * rows * keys * F32) for n in (1, q[1]))
            row = pages(q[1] * rows * F32)
            queries = pages(q[1] * rows * max(q[3], v[3]) * F32)
            sides = pages(k[1] * keys * k[3] * F32) + pages(k[1] * keys * v[3] * F32)
            whole += mask + 6 * row + 6 * queries + 2 * sides
            whole += (4 if call.backward else 2) * scores
            whole += 0 if self.cap is None else (7 if call.backward else 3) * scores
            capped, back = self.cap is not None, call.backward
            whole += prefix_bytes(q, k, v, rows, execution.prefix, back, capped)
            whole += 3 * row if self.sinks else 0
        return whole

    def packed_rows(self, values: Mapping[str, Shape], execution: Execution) -> int:
        """The rows of a factor that a BLAS packs: the queries of a group of heads."""
        q, k, _ = (shape_at(values[name], execution.bucket) for name in self.inputs)
        return q[1] // k[1] * min(execution.bucket, execution.attention_block)

    def check(self, scope: Scope) -> None:
        where = f"{scope.where}: attention"
        require(len(set(self.inputs)) == len(self.inputs), f"{where} of {self.inputs}")
        q, k, v = (scope.values[name] for name in self.inputs)
        out = scope.values[self.outputs[0]]
        shaped = all(len(s) == 4 and s[0] == 1 and s[2] == T for s in (q, k, v, out))
        require(shaped, f"{where} shapes")
        fits = k[1] == v[1] and q[3] == k[3] and out == (1, q[1], T, v[3])
        require(fits, f"{where} shapes")
        require(int(k[1]) > 0 and int(q[1]) % int(k[1]) == 0, f"{where}: {q[1]} heads on {k[1]}")
        require(0 < self.scale <= HUGE, f"{where}: scale {self.scale}")
        require(self.window is None or self.window > 0, f"{where}: window {self.window}")
        check_cap(where, self.cap)
        good = not self.sinks or (
            is_parameter(self.sinks) and scope.parameters[self.sinks[1:]] == q[1:2]
        )
        require(good, f"{where}: sinks {self.sinks}")

    def describe(self, values: Mapping[str, Shape]) -> str:
        window = "" if self.window is None else f" (window {self.window})"
        cap = "" if self.cap is None else f" (cap {self.cap:g})"
        sinks = " (sinks)" if self.sinks else ""
        return f"attention{window}{cap}{sinks} -> " + "x".join(
            map(str, values[self.outputs[0]][1:])
        )


class CachedAttention(Attention, frozen=True, kw_only=True):
    """The same for new q, and k, v of new and of past tokens; never in a bundle.

    `slots` are those of the cache: (1, K, slots, D) for keys and for values. That of the block
    `cache_of`, if one is named, holds the new k and v already.
    """

    slots: int

    @property
    def cache(self) -> tuple[str, str]:
        """The names of the past keys and values."""
        return f"{self.outputs[0]}.keys", f"{self.outputs[0]}.values"

    def cached(self, values: Mapping[str, Shape]) -> Mapping[str, tuple[int, ...]]:
        _, *sources = self.inputs
        if self.cache_of:
            return {}
        return {
            name: shape_at(values[source], self.slots)
            for name, source in zip(self.cache, sources, strict=True)
        }

    @property
    def borrowed(self) -> Mapping[str, str]:
        return dict.fromkeys(self.cache, self.cache_of) if self.cache_of else {}

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The scores of all slots, their mask and probabilities, the queries, and copied keys."""
        q, k, v = (shape_at(call.values[name], call.tokens) for name in self.inputs)
        mask = call.tokens * self.slots * F32
        scores = int(q[1]) * mask
        query_bytes = math.prod(q) * F32
        copied = max(shape[1] * shape[3] for shape in (k, v)) * self.slots * F32
        prefix = prefix_bytes(q, k, v, call.tokens, execution.prefix, False, self.cap is not None)
        return mask + 2 * scores + query_bytes + copied + prefix

    def packed_rows(self, values: Mapping[str, Shape], execution: Execution) -> int:
        q, k, _ = (shape_at(values[name], execution.bucket) for name in self.inputs)
        return q[1] // k[1] * execution.bucket
