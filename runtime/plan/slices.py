"""Folding an MLP into one operation that runs a slice of its width at a time.

An MLP's inner values are several times as wide as the hidden states. With slices they never exist
whole (`runtime.operations.sliced_mlp`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.arrays.stored import DRAWN, Matrix
from runtime.operations.gated import Gated
from runtime.operations.linear import Linear
from runtime.operations.program import Program
from runtime.operations.sliced_mlp import SlicedMlp


def fold(program: Program) -> Program:
    """The program with each MLP as one `SlicedMlp` operation."""
    operations = list(program.operations)
    for at in range(len(operations) - 3, -1, -1):
        into, between, down = operations[at : at + 3]
        if (
            isinstance(into, Linear)
            and isinstance(between, Gated)
            and isinstance(down, Linear)
            and len(down.linears) == 1
            and sorted(into.results) == sorted(between.activations)
            and down.inputs == between.outputs
            and not _is_read_besides(program, at, (*into.results, *between.results))
        ):
            sliced = SlicedMlp(into.inputs, (down.linears[0].output,), into, between, down)
            operations[at : at + 3] = [sliced]
    return replace(program, operations=tuple(operations))


def _is_read_besides(program: Program, at: int, names: tuple[str, ...]) -> bool:
    """Whether values inside an MLP, whose first operation is at `at`, are read outside it."""
    others = (*program.operations[:at], *program.operations[at + 3 :])
    read = {name for operation in others for name in operation.inputs_read} | {program.output}
    return not read.isdisjoint(names)


def width_of(gate: Matrix, down: Matrix, values: int) -> int:
    """How many columns of its width an MLP takes at once.

    It is a multiple of the columns that share a scale, or whose dropout is drawn together: the
    largest with which a slice of a matrix has at most `values` values, else the smallest.
    """
    unit = math.lcm(DRAWN, down.group_size or 1)
    most = values // max(gate.columns, down.rows)
    if most >= down.columns:
        return down.columns
    most = max(unit, most // unit * unit)
    share = math.ceil(down.columns / math.ceil(down.columns / most))  # slices of about one size
    return math.ceil(share / unit) * unit
