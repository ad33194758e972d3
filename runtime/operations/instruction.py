"""One operation of a program as it runs: forward or backward, with what it computes and frees."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.operations.base import Operation
from runtime.operations.program import Program


@dataclass(frozen=True)
class Body:
    """What runs inside an operation, once for each tile of `tokens` tokens."""

    program: Program
    tokens: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Instruction:
    """One operation, run forward or backward.

    `wanted` are the results to compute (forward) or the values to return gradients for (backward);
    `statistics` are the values that a forward computes only for its backward; `frees` are the
    values and gradients that are freed after the instruction. `same` says for each wanted gradient
    which cotangent or earlier gradient is the same array afterwards, or "" for a new array.
    """

    backward: bool
    operation: Operation
    wanted: tuple[str, ...]
    statistics: tuple[str, ...]
    frees: tuple[str, ...]
    same: tuple[str, ...] = ()
    body: Body | None = None
