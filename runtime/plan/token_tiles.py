"""Folding the operations of an MLP into one operation that runs on tiles of tokens.

An MLP is linear, elementwise, linear. Its inner values are several times as wide as the hidden
states, and with tiles they exist for a few tokens only (`runtime.operations.tiled`).
"""

from __future__ import annotations

from dataclasses import replace

from runtime.operations.program import Program
from runtime.operations.tiled import Tiled


def fold(program: Program) -> Program:
    """The program with its longest foldable sequence as one `Tiled` operation, if there is one."""
    stretches = []
    for first in range(len(program.operations)):
        for last in range(first, len(program.operations)):
            if not program.operations[last].tokenwise:
                break
            if _is_foldable(program, first, last):
                stretches.append((first, last))
    if not stretches:
        return program
    first, last = max(stretches, key=lambda ends: ends[1] - ends[0])
    inside = program.operations[first : last + 1]
    (source,), (result,) = inside[0].inputs_read, inside[-1].results
    tiled = Tiled((source,), (result,), inside)
    before, after = program.operations[:first], program.operations[last + 1 :]
    return replace(program, operations=(*before, tiled, *after))


def unfold(program: Program, tiled: Tiled) -> Program:
    """A program of the operations inside a `Tiled` operation."""
    (source,), (result,) = tiled.inputs, tiled.outputs
    name = f"{program.name}.{result}"
    return replace(program, name=name, input=source, output=result, operations=tiled.inside)


def tiled_of(program: Program) -> Tiled | None:
    """The `Tiled` operation of a folded program; None if nothing was folded."""
    return next(
        (operation for operation in program.operations if isinstance(operation, Tiled)), None
    )


def tile_tokens(program: Program, bucket: int, at_most: int) -> int:
    """The tokens that the `Tiled` operation of a folded program takes at once.

    It is a divisor of the bucket, and a multiple of the operations' unit: the largest that is
    at most `at_most`, else the smallest. If nothing is tiled, it is the bucket.
    """
    tiled = tiled_of(program)
    if tiled is None:
        return bucket
    unit = tiled.tile_unit(bucket)
    sizes = [size for size in range(unit, bucket + 1, unit) if bucket % size == 0]
    return max((size for size in sizes if size <= at_most), default=unit)


def _is_foldable(program: Program, first: int, last: int) -> bool:
    """Whether operations are linear, elementwise, linear, with one value in and one out."""
    inside, after = program.operations[first : last + 1], program.operations[last + 1 :]
    if not inside[0].products or len(inside[-1].products) != 1:
        return False
    if all(operation.products for operation in inside):
        return False
    (result,) = inside[-1].products
    made = {name for operation in inside for name in operation.results}
    read = {name for operation in inside for name in operation.activations}
    read_after = {name for operation in after for name in operation.inputs_read} | {program.output}
    return read - made == set(inside[0].inputs_read) and made & read_after <= {result}
