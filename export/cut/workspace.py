"""The memory that MLX takes to evaluate a traced graph, from a simulation of its evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from runtime.arrays.stored import pages

# a primitive as `mx.export_function` reports it: its name, and (name, shape, dtype) of its inputs
# and outputs
Primitive = dict[str, Any]

# primitives whose result is their first operand's memory
VIEWS = {
    "Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "StopGradient",
    "Transpose", "Unflatten",
}  # fmt: skip
# primitives whose result may take the memory of an operand
IN_PLACE = {
    "Abs", "Add", "Cos", "Divide", "Exp", "Log", "Maximum", "Minimum", "Multiply", "Negative",
    "Power", "Rsqrt", "Select", "Sigmoid", "Sin", "Sqrt", "Square", "Subtract", "Tanh",
}  # fmt: skip
RUN_AHEAD = 2  # MLX frees an array so many primitives after the last one that reads it
RESHAPING = {"Flatten", "Reshape", "Unflatten"}  # which copy what a transposition has reordered
REORDERING = {"Broadcast", "Slice", "Transpose"}  # whose results are not contiguous
SUMMED_ROWS = 512  # of a norm's weight gradient, which a GPU sums in a further operation


def workspace_bytes(primitives: list[Primitive], outputs: list[str]) -> int:
    """Peak bytes of the arrays that primitives allocate, less those of the outputs.

    An array is freed after its last use, or its memory becomes that of a result of its size.

    Args:
        primitives: in any order that can be computed.
        outputs: names of the graph's results.
    """
    primitives = [_with_temporary(p) for p in _as_evaluated(primitives, outputs)]
    owner: dict[str, str] = {}
    last: dict[str, int] = {}
    for index, primitive in enumerate(primitives):
        sources = [owner.get(name, name) for name, _, _ in primitive["inputs"]]
        last.update(dict.fromkeys(sources, index))
        if primitive["name"] in VIEWS:
            owner.update((name, sources[0]) for name, _, _ in primitive["outputs"])
    last.update((owner.get(name, name), len(primitives)) for name in outputs)
    alive: dict[str, int] = {}
    freed_later: list[list[str]] = [[] for _ in range(RUN_AHEAD)]
    peak = 0
    for index, primitive in enumerate(primitives):
        read = {owner.get(name, name) for name, _, _ in primitive["inputs"]} & set(alive)
        dying = [name for name in sorted(read) if last[name] == index]
        allocated = {
            name: math.prod(shape) * dtype.size for name, shape, dtype in primitive["outputs"]
        }
        if primitive["name"] in VIEWS:
            allocated = {}
        if primitive["name"] in IN_PLACE:
            (size,) = allocated.values()
            reused = next((name for name in dying if alive[name] == size), None)
            if reused is not None:
                dying.remove(reused)
                del alive[reused]
        alive.update(allocated)
        peak = max(peak, sum(alive.values()))
        freed_later.append([*dying, *(name for name in allocated if name not in last)])
        for name in freed_later.pop(0):
            del alive[name]
    freed = {name for names in freed_later for name in names}
    return max(0, peak - sum(size for name, size in alive.items() if name not in freed))


def allocated_bytes(primitives: list[Primitive], outputs: list[str]) -> int:
    """Bytes of all arrays that primitives allocate, besides the outputs, in whole pages.

    A GPU frees none of them before its command buffer ends. Memory that becomes that of a result of
    its size counts once.
    """
    primitives = [_with_temporary(p) for p in _as_evaluated(primitives, outputs)]
    owner: dict[str, str] = {}
    reordered: set[str] = set()
    uses = Counter(name for primitive in primitives for name, _, _ in primitive["inputs"])
    uses.update(outputs)
    size: dict[str, int] = {}
    for primitive in primitives:
        sources = [name for name, _, _ in primitive["inputs"]]
        copies = primitive["name"] in RESHAPING and sources[0] in reordered
        if primitive["name"] in VIEWS and not copies:
            ((made, _, _),) = primitive["outputs"]
            owner[made] = owner.get(sources[0], sources[0])
            if primitive["name"] in REORDERING or sources[0] in reordered:
                reordered.add(made)
            continue
        for name, shape, dtype in primitive["outputs"]:
            size[name] = pages(math.prod(shape) * dtype.size)
        if primitive["name"] in IN_PLACE:
            bases = [(name, owner.get(name, name)) for name in sources]
            once = [base for name, base in bases if uses[name] == uses[base] == 1 and base in size]
            made = primitive["outputs"][0][0]
            reused = next((name for name in once if size[name] == size[made]), None)
            if reused is not None:
                del size[reused]
    results = {owner.get(name, name) for name in outputs}
    return sum(nbytes for name, nbytes in size.items() if name not in results)


def views(
    primitives: list[Primitive], inputs: Sequence[tuple[str, Sequence[int], Any]]
) -> dict[str, int]:
    """The arrays that are the whole memory of an input (name, shape, dtype), with its place.

    Inputs are taken to be contiguous. A part of an input is none: it may be copied apart.
    """
    places = {name: place for place, (name, _, _) in enumerate(inputs)}
    reordered: set[str] = set()
    for primitive in primitives:
        if primitive["name"] not in VIEWS:
            continue
        (source, *_), (made, *_) = (primitive[side][0] for side in ("inputs", "outputs"))
        copies = primitive["name"] in RESHAPING and source in reordered
        place = places.get(source)
        if place is None or copies:
            continue
        if math.prod(primitive["outputs"][0][1]) == math.prod(inputs[place][1]):
            places[made] = place
            if primitive["name"] in REORDERING or source in reordered:
                reordered.add(made)
    return places


def _with_temporary(primitive: Primitive) -> Primitive:
    """The primitive with the temporary array of a GPU's kernel, where it has one, as an output."""
    if primitive["name"] != "RMSNormVJP":
        return primitive
    _, (*rows, width), dtype = primitive["inputs"][0]
    shape = (min(SUMMED_ROWS, math.prod(rows)), width)
    temporary = (f"{primitive['outputs'][0][0]}, summed", shape, dtype)
    return {**primitive, "outputs": [*primitive["outputs"], temporary]}


def _as_evaluated(primitives: list[Primitive], outputs: list[str]) -> list[Primitive]:
    """The primitives in MLX's order: depth first from the outputs, first operands first."""
    maker = {
        name: index
        for index, primitive in enumerate(primitives)
        for name, _, _ in primitive["outputs"]
    }
    order: dict[int, None] = {}
    stack = [(maker[name], False) for name in reversed(outputs) if name in maker]
    while stack:
        index, operands_done = stack.pop()
        if operands_done:
            order[index] = None
        elif index not in order:
            stack.append((index, True))
            sources = reversed([name for name, _, _ in primitives[index]["inputs"]])
            stack += [(maker[name], False) for name in sources if name in maker]
    return [primitives[index] for index in order]
