"""Tracing a function with MLX: the inputs that its results depend on, and its graph as a file.

A function takes float32 arrays by position and returns a list of them. It is traced with
compilation disabled, so that helpers that mlx-lm compiles become primitives of the graph.
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

from export.cut.workspace import Primitive, allocated_bytes, workspace_bytes

Function = Callable[..., list[mx.array]]


@dataclass(frozen=True)
class Trace:
    """Facts about a traced function; each list has one entry for each output.

    Attributes:
        depends: the positions of the inputs that the output depends on.
        passes: the position of the input that the output is, unchanged; or None.
        same: the position of the first output that is the same array; None if it is the first.
        output_shapes: the output's shape.
        signature: equal for equal computations: primitives, arguments, shapes and constants.
        workspace_bytes: the peak of MLX's allocations for the graph, less its outputs.
        allocated_bytes: all of MLX's allocations for the graph, less its outputs.
    """

    depends: tuple[frozenset[int], ...]
    passes: tuple[int | None, ...]
    same: tuple[int | None, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    signature: str
    workspace_bytes: int
    allocated_bytes: int


@contextmanager
def _tracing(differentiated: bool) -> Iterator[None]:
    """For a CPU, replace MLX's sigmoid and tanh by faster ones.

    `mx.contiguous`, which changes no value, is left out: MLX cannot serialize it.

    MLX's CPU backend computes exp, sigmoid and tanh one value at a time; its `power` is three to
    four times as fast, but its vjp is not: it takes the logarithm of every base. So where the
    function is differentiated, the derivative s' is written out: s + (x - stop(x)) s' has the value
    s and the gradient s'.
    """
    replaced: dict[str, Callable[..., mx.array]] = {"contiguous": lambda x, *_, **__: x}
    if mx.default_device() != mx.Device(mx.gpu):
        replaced |= {"sigmoid": _sigmoid, "tanh": _tanh}
        if differentiated:
            replaced |= {
                "sigmoid": _with_slope(_sigmoid, lambda s: s * (1 - s)),
                "tanh": _with_slope(_tanh, lambda t: 1 - t * t),
            }
    before = {name: getattr(mx, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(mx, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(mx, name, function)


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


def trace(function: Function, inputs: Sequence[mx.array], differentiated: bool = False) -> Trace:
    """Trace `function` at the shapes of `inputs`, without evaluating it.

    `differentiated` says whether the function calls `mx.vjp`.
    """
    events: list[dict[str, Any]] = []
    with _tracing(differentiated):
        mx.export_function(events.append, function, *inputs)
    graph = _RecordedGraph()
    for event in _in_order(events):
        graph.add(event)
    return graph.facts()


def _in_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, with each primitive after those whose results it takes.

    MLX may report a primitive with several results after one that takes the first of them.
    """
    primitives = [event for event in events if event["type"] == "primitive"]
    maker = {name: event for event in primitives for name, _, _ in event["outputs"]}
    ordered: dict[int, dict[str, Any]] = {}
    for event in events:
        late = [event]
        while late:
            sources = [name for name, _, _ in late[-1].get("inputs", ())] if maker else []
            makers = [maker[name] for name in sources if name in maker]
            missing = [earlier for earlier in makers if id(earlier) not in ordered]
            if missing and late[-1]["type"] == "primitive":
                late.append(missing[0])
            else:
                last = late.pop()
                ordered[id(last)] = last
    return list(ordered.values())


class _RecordedGraph:
    """A graph, from the events that `mx.export_function` reports, and the reach of its inputs."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}  # of each array, by its name, which differs between runs
        self.position: dict[str, int] = {}  # of each input
        self.depends: dict[str, frozenset[int]] = {}  # the positions of the inputs, by array
        self.primitives: list[Primitive] = []
        self.outputs: list[tuple[str, tuple[int, ...], Any]] = []
        self.digest = hashlib.sha256()

    def add(self, event: dict[str, Any]) -> None:
        """Take an event."""
        if event["type"] == "inputs":
            for position, (name, shape, dtype) in enumerate(event["inputs"]):
                self.position[name] = position
                self._array(name, frozenset([position]))
                self._note("input", shape, str(dtype))
        elif event["type"] == "constants":
            for name, value in event["constants"]:
                self._array(name, frozenset())
                self._note("constant", value.shape, str(value.dtype), value.tolist())
        elif event["type"] == "outputs":
            self.outputs = event["outputs"]
        elif event["type"] == "primitive":
            self._primitive(event)

    def _primitive(self, event: Primitive) -> None:
        self.primitives.append(event)
        sources = [name for name, _, _ in event["inputs"]]
        depends = frozenset().union(*(self.depends[name] for name in sources))
        for name, shape, dtype in event["outputs"]:
            self._array(name, depends)
            self._note(event["name"], event["arguments"], [self.number[s] for s in sources])
            self._note(shape, str(dtype))

    def _array(self, name: str, depends: frozenset[int]) -> None:
        self.number[name] = len(self.number)
        self.depends[name] = depends

    def _note(self, *parts: Any) -> None:
        self.digest.update(repr(parts).encode())

    def facts(self) -> Trace:
        """The facts about the graph, after its last event."""
        names = [name for name, _, _ in self.outputs]
        self._note("outputs", [self.number[name] for name in names])
        return Trace(
            depends=tuple(self.depends[name] for name in names),
            passes=tuple(self.position.get(name) for name in names),
            same=tuple(_first_same(names)),
            output_shapes=tuple(tuple(shape) for _, shape, _ in self.outputs),
            signature=self.digest.hexdigest(),
            workspace_bytes=workspace_bytes(self.primitives, names),
            allocated_bytes=allocated_bytes(self.primitives, names),
        )


def _first_same(names: list[str]) -> Iterator[int | None]:
    for index, name in enumerate(names):
        first = names.index(name)
        yield first if first < index else None


def serialize(
    path: Path, function: Function, inputs: Sequence[mx.array], differentiated: bool = False
) -> None:
    """Write `function`, at the shapes of `inputs`, to a file that `mx.import_function` reads."""
    with _tracing(differentiated):
        mx.export_function(str(path), function, *inputs)
