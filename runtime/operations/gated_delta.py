"""The operation GatedDelta: the gated delta rule, an attention whose past is one matrix a head.

Yang, Kautz and Hatamizadeh (arXiv 2412.06464). A sequence is computed in chunks of `CHUNK` tokens.
Of the states between chunks, the forward keeps the first of each `SEGMENT` chunks; the backward
recomputes those between. A state never crosses from one packed row to the next, and chunks begin
where rows do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from runtime.arrays.stored import pages
from runtime.operations.base import Call, Function, Operation, Scope, require
from runtime.operations.execution import Execution
from runtime.operations.values import F32, Shape, T, shape_at

CHUNK = 32  # tokens
SEGMENT = 4  # chunks, whose states a backward holds at once


class GatedDelta(Function, frozen=True):
    """y_t = S_t^T q_t, with S_t = a_t S_(t-1) + k_t u_t^T and u_t = b_t (v_t - a_t S_(t-1)^T k_t).

    The inputs are q, k (1, T, K, D), v (1, T, H, E), log a and b (1, T, H), with H a multiple of K.
    A head has a state S (D, E); value head h reads key head h // (H / K). y is shaped as v.
    """

    inputs: tuple[str, str, str, str, str]
    outputs: tuple[str]

    @property
    def label(self) -> str:
        return "gated delta rule"

    @property
    def statistics(self) -> tuple[str, ...]:
        """The states (N, K, H / K, D, E) before all segments of a row but its first."""
        return (f"{self.outputs[0]}.states",)

    def decoding(self, context: int) -> Operation:
        """`CachedGatedDelta`, which goes on from the last state."""
        return CachedGatedDelta(self.inputs, self.outputs)

    def read_by_backward(self, adapted: frozenset[str]) -> frozenset[str]:
        return frozenset((*self.inputs, *self.statistics))

    def statistic_bytes(self, name: str, call: Call) -> int:
        return states_kept(call.tokens) * math.prod(self.state(call.values)) * F32

    def state(self, values: Mapping[str, Shape]) -> tuple[int, int, int, int]:
        """(K, H / K, D, E) of a sequence's state."""
        q, v = (shape_at(values[self.inputs[at]], 1) for at in (0, 2))
        return q[2], v[2] // q[2], q[3], v[3]

    def working_bytes(self, call: Call, execution: Execution) -> int:
        """The arrays of one chunk, and the states around it; backward those of a segment."""
        state = math.prod(self.state(call.values)) * F32
        if not call.backward:
            return self._chunk_bytes(call, 5, 7) + 3 * state
        held = min(SEGMENT, -(-call.tokens // CHUNK))
        unwanted = (call.bytes_of(name) for name in self.inputs if name not in call.wanted)
        return self._chunk_bytes(call, 8, 10) + (held + 2) * state + sum(unwanted)

    def _chunk_bytes(self, call: Call, squares: int, rows: int) -> int:
        """Bytes of so many arrays (H, n, n), and (H, n, D) or (H, n, E), of a chunk's n tokens.

        And of two (n, n), which select pairs.
        """
        groups, repeats, width, value_width = self.state(call.values)
        tokens = min(call.tokens, CHUNK)
        each = squares * tokens + rows * max(width, value_width)
        return (groups * repeats * each + 2 * tokens) * tokens * F32

    def allocated_bytes(self, call: Call, execution: Execution) -> int:
        """Those of every chunk: a state or its gradient is read by the next one."""
        chunks = -(-call.tokens // CHUNK)
        state = math.prod(self.state(call.values)) * F32
        squares, rows, states = (36, 40, 12) if call.backward else (20, 14, 4)
        each = pages(self._chunk_bytes(call, squares, rows)) + states * pages(state)
        results = sum(pages(call.bytes_of(name)) for name in (*self.inputs, *self.outputs))
        return chunks * each + results

    def check(self, scope: Scope) -> None:
        where = f"{scope.where}: {self.label}"
        require(len(set(self.inputs)) == len(self.inputs), f"{where} of {self.inputs}")
        q, k, v, decay, beta = (scope.values[name] for name in self.inputs)
        shaped = all(shape[:2] == (1, T) for shape in (q, k, v, decay, beta))
        require(shaped and len(q) == len(v) == 4, f"{where} shapes")
        fits = q == k and decay == beta == v[:3] and scope.values[self.outputs[0]] == v
        require(fits, f"{where} shapes")
        require(int(v[2]) % int(q[2]) == 0, f"{where}: {v[2]} heads on {q[2]}")


class CachedGatedDelta(GatedDelta, frozen=True):
    """The same of new tokens, after a state that they change; never in a bundle."""

    rewinds: ClassVar[bool] = False

    @property
    def cache(self) -> str:
        """The name of the state after the last token."""
        return f"{self.outputs[0]}.state"

    def cached(self, values: Mapping[str, Shape]) -> Mapping[str, tuple[int, ...]]:
        return {self.cache: self.state(values)}


def states_kept(tokens: int) -> int:
    """The most states that are kept of so many tokens, however they are divided into rows."""
    return max(0, tokens - 1) // (CHUNK * SEGMENT)
