"""The memory that MLX takes to evaluate a traced graph, from a simulation of its evaluation."""

from __future__ import annotations

import math
from typing import Any

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


def workspace_bytes(primitives: list[Primitive], outputs: list[str]) -> int:
    """Peak bytes of the arrays that primitives allocate, less those of the outputs.

    An array is freed after its last use, or its memory becomes that of a result of its size.

    Args:
        primitives: in any order that can be computed.
        outputs: names of the graph's results.
    """
    primitives = _as_evaluated(primitives, outputs)
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
