"""Tracing functions into graphs: what they depend on, what they need, and their serialized form.

Every function here is a plain positional function over float32 arrays. Graphs are traced with
compilation disabled, so that helpers which mlx-lm compiles are inlined as primitives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

Function = Callable[..., list[mx.array]]


@dataclass(frozen=True)
class Trace:
    """A traced graph: per output the positions of the inputs it depends on, and a signature.

    `passes[i]` is the input that output i is, untouched, or None; `same[i]` the first output that
    is the same array as output i, or None. `signature` is equal for equal computations (primitives,
    arguments, shapes, constants), whatever names the tracer gave.
    `workspace_bytes` is the peak of what is alive when MLX evaluates the graph, less its outputs.
    """

    depends: tuple[frozenset[int], ...]
    passes: tuple[int | None, ...]
    same: tuple[int | None, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    signature: str
    workspace_bytes: int


@contextmanager
def _tracing(differentiated: bool) -> Iterator[None]:
    """Inline what mlx-lm compiles, and on a CPU keep sigmoid and tanh off MLX's scalar path.

    MLX's CPU backend computes exp, sigmoid and tanh one value at a time; its `power` is three to
    four times as fast, but not its vjp, which takes the logarithm of every base. Where the function
    is differentiated the derivative is spelled out: s + (x - stop(x)) s' has the value s and the
    gradient s'.
    """
    replaced: dict[str, Callable[[mx.array], mx.array]] = {}
    if mx.default_device() != mx.Device(mx.gpu):
        replaced = {"sigmoid": _sigmoid, "tanh": _tanh}
        if differentiated:
            replaced = {
                "sigmoid": _with_slope(_sigmoid, lambda s: s * (1 - s)),
                "tanh": _with_slope(_tanh, lambda t: 1 - t * t),
            }
    before = {name: getattr(mx, name) for name in replaced}
    mx.disable_compile()
    try:
        for name, function in replaced.items():
            setattr(mx, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(mx, name, function)
        mx.enable_compile()


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + mx.power(mx.array(math.e), mx.minimum(-x, 80)))


def _tanh(x: mx.array) -> mx.array:
    return 1 - 2 / (1 + mx.power(mx.array(math.e), mx.minimum(2 * x, 80)))


def _with_slope(
    function: Callable[[mx.array], mx.array], slope: Callable[[mx.array], mx.array]
) -> Callable[[mx.array], mx.array]:
    def differentiable(x: mx.array) -> mx.array:
        value = mx.stop_gradient(function(mx.stop_gradient(x)))
        return value + (x - mx.stop_gradient(x)) * slope(value)

    return differentiable


def _record(
    function: Function, inputs: Sequence[mx.array], differentiated: bool
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    with _tracing(differentiated):
        mx.export_function(events.append, function, *inputs)
    return events


def trace(function: Function, inputs: Sequence[mx.array], differentiated: bool = False) -> Trace:
    """Trace `function` at the shapes of `inputs` without evaluating it.

    `differentiated` says that it calls `mx.vjp` itself.
    """
    number: dict[str, int] = {}
    arguments: set[str] = set()
    reach: dict[str, frozenset[int]] = {}
    digest = hashlib.sha256()
    primitives: list[dict[str, Any]] = []
    outputs: list[tuple[str, tuple[int, ...], Any]] = []

    def note(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    for event in _record(function, inputs, differentiated):
        if event["type"] == "inputs":
            for position, (name, shape, dtype) in enumerate(event["inputs"]):
                number[name] = len(number)
                arguments.add(name)
                reach[name] = frozenset([position])
                note("input", shape, str(dtype))
        elif event["type"] == "constants":
            for name, value in event["constants"]:
                number[name] = len(number)
                reach[name] = frozenset()
                note("constant", value.shape, str(value.dtype), value.tolist())
        elif event["type"] == "outputs":
            outputs = event["outputs"]
        elif event["type"] == "primitive":
            primitives.append(event)
            sources = [name for name, _, _ in event["inputs"]]
            union = frozenset().union(*(reach[name] for name in sources))
            for name, shape, dtype in event["outputs"]:
                number[name] = len(number)
                reach[name] = union
                note(event["name"], event["arguments"], [number[s] for s in sources])
                note(shape, str(dtype))
    positions = {name: min(reach[name]) for name in number if name in arguments}
    note("outputs", [number[name] for name, _, _ in outputs])
    return Trace(
        depends=tuple(reach[name] for name, _, _ in outputs),
        passes=tuple(positions.get(name) for name, _, _ in outputs),
        same=tuple(_first_same([name for name, _, _ in outputs])),
        output_shapes=tuple(tuple(shape) for _, shape, _ in outputs),
        signature=digest.hexdigest(),
        workspace_bytes=_workspace(primitives, [name for name, _, _ in outputs]),
    )


def _first_same(names: list[str]) -> Iterator[int | None]:
    for index, name in enumerate(names):
        first = names.index(name)
        yield first if first < index else None


VIEWS = {
    "StopGradient",
    "Broadcast",
    "Reshape",
    "Transpose",
    "Squeeze",
    "ExpandDims",
    "Flatten",
    "Unflatten",
}


# whose result takes the place of an operand of its size that nothing else reads
ELEMENTWISE = {
    "Abs",
    "Add",
    "Cos",
    "Divide",
    "Exp",
    "Log",
    "Maximum",
    "Minimum",
    "Multiply",
    "Negative",
    "Power",
    "Rsqrt",
    "Select",
    "Sigmoid",
    "Sin",
    "Sqrt",
    "Square",
    "Subtract",
    "Tanh",
}


RUN_AHEAD = 2  # operations that MLX has allocated for before it gives back what one was done with


def _as_evaluated(primitives: list[dict[str, Any]], outputs: list[str]) -> list[dict[str, Any]]:
    """In MLX's order: depth first from the outputs, an operation's operands from the first."""
    maker = {name: index for index, one in enumerate(primitives) for name, _, _ in one["outputs"]}
    order: dict[int, None] = {}
    stack = [(maker[name], False) for name in reversed(outputs) if name in maker]
    while stack:
        index, ready = stack.pop()
        if ready:
            order[index] = None
        elif index not in order:
            stack.append((index, True))
            sources = reversed([name for name, _, _ in primitives[index]["inputs"]])
            stack += [(maker[name], False) for name in sources if name in maker]
    return [primitives[index] for index in order]


def _workspace(primitives: list[dict[str, Any]], outputs: list[str]) -> int:
    """Peak bytes beside the outputs; what primitives make dies at its last use.

    MLX gives the place of an operand that dies to the result of its size.
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
    going: list[list[str]] = [[] for _ in range(RUN_AHEAD)]
    peak = 0
    for index, primitive in enumerate(primitives):
        read = {owner.get(name, name) for name, _, _ in primitive["inputs"]} & set(alive)
        dying = [name for name in sorted(read) if last[name] == index]
        made = {name: math.prod(shape) * dtype.size for name, shape, dtype in primitive["outputs"]}
        if primitive["name"] in VIEWS:
            made = {}
        if primitive["name"] in ELEMENTWISE:
            (size,) = made.values()
            taken = next((name for name in dying if alive[name] == size), None)
            if taken is not None:
                dying.remove(taken)
                del alive[taken]
        alive.update(made)
        peak = max(peak, sum(alive.values()))
        going.append([*dying, *(name for name in made if name not in last)])
        for name in going.pop(0):
            del alive[name]
    rest = {name for names in going for name in names}
    return max(0, peak - sum(size for name, size in alive.items() if name not in rest))


def serialize(
    path: Path, function: Function, inputs: Sequence[mx.array], differentiated: bool = False
) -> None:
    """Write `function` at the shapes of `inputs` as an MLX exported function."""
    with _tracing(differentiated):
        mx.export_function(str(path), function, *inputs)
