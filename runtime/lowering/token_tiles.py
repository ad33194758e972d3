"""Folding the operations of a layer that treat every token alike into one that runs by tiles.

An MLP is linear, elementwise, linear: what lies between is several times as wide as the hidden
states, and need exist for a tile of tokens only (`ondevice.operations.tiled`).
"""

from __future__ import annotations

from dataclasses import replace

from ondevice.operations.program import Program
from ondevice.operations.tiled import Tiled


def fold(program: Program) -> Program:
    """The program with its longest such stretch as one `Tiled` operation, if there is any."""
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
    """The operations inside a `Tiled` one as a program of their own."""
    (source,), (result,) = tiled.inputs, tiled.outputs
    name = f"{program.name}.{result}"
    return replace(program, name=name, input=source, output=result, operations=tiled.inside)


def tiled_of(program: Program) -> Tiled | None:
    """The `Tiled` operation of a folded program; None where nothing was folded."""
    return next((one for one in program.operations if isinstance(one, Tiled)), None)


def tile_tokens(program: Program, bucket: int, at_most: int) -> int:
    """The tokens that the `Tiled` operation of a folded program takes at once.

    A divisor of the bucket that is a multiple of what its operations need: the largest that is no
    more than `at_most`, or the smallest where there is none; the bucket where nothing is tiled.
    """
    tiled = tiled_of(program)
    if tiled is None:
        return bucket
    unit = tiled.tile_unit(bucket)
    sizes = [size for size in range(unit, bucket + 1, unit) if bucket % size == 0]
    return max((size for size in sizes if size <= at_most), default=unit)


def _is_foldable(program: Program, first: int, last: int) -> bool:
    """From products to one product by something elementwise, one value in and one value out."""
    inside, after = program.operations[first : last + 1], program.operations[last + 1 :]
    if not inside[0].products or len(inside[-1].products) != 1:
        return False
    if all(one.products for one in inside):
        return False
    (result,) = inside[-1].products
    made = {name for one in inside for name in one.results}
    read = {name for one in inside for name in one.activations}
    read_after = {name for one in after for name in one.inputs_read} | {program.output}
    return read - made == set(inside[0].inputs_read) and made & read_after <= {result}
