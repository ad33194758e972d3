"""The operation CachedAttention: attention of new tokens to themselves and to a key-value cache.

The lowering replaces `Attention` by it for decoding. The cache is a ring: the key of the token at
position p lies in slot p modulo the number of slots. So a layer with a window keeps no more tokens
than its window, and a chunk of a prompt besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from runtime.operations.base import Call, Execution, Function
from runtime.operations.values import CHUNK_TOKENS, F32, Shape, shape_at


def slots_of(context: int, window: int | None) -> int:
    """How many tokens' keys a cache holds for a context of so many tokens.

    A chunk that begins within the context may end beyond it, since the last chunk of a prompt is
    padded; and while its last token is written, its first one still reads its whole window.
    """
    seen = context if window is None else min(context, window)
    return seen + CHUNK_TOKENS - 1


def prefix_of(output: str) -> str:
    """The name of the prefix of an attention with this output, relative to the block."""
    return output.removesuffix(".out")


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


class CachedAttention(Function, frozen=True):
    """softmax(q k^T scale) v for new q (1, H, T, D), and k, v of new and of past tokens.

    Never in a bundle. For `cap` see `Attention`. `slots` are those of the cache: (1, K, slots, D)
    for keys and for values. That of the block `cache_of`, if one is named, holds the new k and v
    already.
    """

    inputs: tuple[str, str, str]
    outputs: tuple[str]
    scale: float
    window: int | None
    slots: int
    cap: float | None = None
    cache_of: str = ""

    @property
    def prefix(self) -> str:
        """The name of its prefix, relative to the block."""
        return prefix_of(self.outputs[0])

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
