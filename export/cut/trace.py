"""Tracing a function with MLX: the inputs that its results depend on, and its graph as a file.

A function takes float32 arrays by position and returns a list of them. It is traced with
compilation disabled, so that helpers that mlx-lm compiles become primitives of the graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from export.cut.stand_ins import Replacement, replaced
from export.cut.workspace import allocated_bytes, views, workspace_bytes

Function = Callable[..., list[mx.array]]


@contextmanager
def _tracing(differentiated: bool) -> Iterator[None]:
    """For a CPU, replace MLX's sigmoid, tanh and norms by faster ones.

    `mx.contiguous`, which changes no value, is left out: MLX cannot serialize it.

    MLX's CPU backend computes exp, sigmoid and tanh one value at a time; its `power` is three to
    four times as fast, but its vjp is not: it takes the logarithm of every base. So where the
    function is differentiated, the derivative s' is written out: s + (x - stop(x)) s' has the value
    s and the gradient s'.

    MLX's CPU backend adds a row's squares one after the other, which loses 1e-6 of 1,000 of them.
    """
    replacements: list[Replacement] = [(mx, "contiguous", lambda x, *_, **__: x)]
    if mx.default_device() != mx.Device(mx.gpu):
        replacements += [
            *((mx, "sigmoid", _sigmoid), (mx, "tanh", _tanh)),
            *((mx.fast, "rms_norm", _rms_norm), (mx.fast, "layer_norm", _layer_norm)),
        ]
        if differentiated:
            replacements += [
                (mx, "sigmoid", _with_slope(_sigmoid, lambda s: s * (1 - s))),
                (mx, "tanh", _with_slope(_tanh, lambda t: 1 - t * t)),
            ]
    with replaced(replacements):
        yield


def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + mx.power(mx.array(math.e), mx.minimum(-x, 80)))


def _tanh(x: mx.array) -> mx.array:
    return 1 - 2 / (1 + mx.power(mx.array(math.e), mx.minimum(2 * x, 80)))


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    y = _over_root(x, eps)
    return y if weight is None else y * weight


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
) -> mx.array:
    y = _over_root(x - _mean(x), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _over_root(x: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(_mean(x.square()) + eps)


def _mean(x: mx.array) -> mx.array:
    """The mean of the last axis (..., n), as (..., 1): of as many sums as each has values."""
    width = x.shape[-1]
    part = next(n for n in range(math.isqrt(width), 0, -1) if width % n == 0)
    sums = x.reshape(*x.shape[:-1], part, width // part).sum(axis=-1)
    return sums.sum(axis=-1, keepdims=True) / width


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
    return Trace(_in_order(events))


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


class Trace:
    """Facts about a traced function; of lists, each entry is of one output.

    Attributes:
        depends: the positions of the inputs that the output depends on.
        passes: the position of the input that the output is, unchanged; or None.
        same: the position of the first output that is the same array; None if it is the first.
        output_shapes: the output's shape.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        """Of the events that `mx.export_function` reports."""
        self._events = events
        of_type = {event["type"]: event for event in events}
        inputs, outputs = of_type["inputs"]["inputs"], of_type["outputs"]["outputs"]
        self._primitives = [event for event in events if event["type"] == "primitive"]
        self._inputs = inputs
        self._names = names = [name for name, _, _ in outputs]
        position = {name: at for at, (name, _, _) in enumerate(inputs)}
        depends = {name: frozenset([at]) for name, at in position.items()}
        constant: frozenset[int] = frozenset()
        for primitive in self._primitives:
            read = (depends.get(name, constant) for name, _, _ in primitive["inputs"])
            reached = constant.union(*read)
            depends.update((name, reached) for name, _, _ in primitive["outputs"])
        self.depends = tuple(depends.get(name, constant) for name in names)
        self.passes = tuple(position.get(name) for name in names)
        self.same = tuple(_first_same(names))
        self.output_shapes = tuple(tuple(shape) for _, shape, _ in outputs)

    @cached_property
    def signature(self) -> str:
        """Equal for equal computations: primitives, arguments, shapes and constants."""
        number: dict[str, int] = {}  # of each array, by its name, which differs between runs
        parts: list[Any] = []
        for event in self._events:
            if event["type"] == "constants":
                for name, value in event["constants"]:
                    number[name] = len(number)
                    parts.append((value.shape, str(value.dtype), value.tolist()))
            elif event["type"] in ("inputs", "primitive"):
                made = event["outputs" if event["type"] == "primitive" else "inputs"]
                if event["type"] == "primitive":
                    sources = [number[name] for name, _, _ in event["inputs"]]
                    parts.append((event["name"], event["arguments"], sources))
                for name, shape, dtype in made:
                    number[name] = len(number)
                    parts.append((shape, str(dtype)))
        parts.append([number[name] for name in self._names])
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @cached_property
    def workspace_bytes(self) -> int:
        """The peak of MLX's allocations for the graph, less its outputs."""
        return workspace_bytes(self._primitives, self._names)

    @cached_property
    def views(self) -> tuple[int, ...]:
        """For each output the input whose whole memory it is, or -1; empty if none is one."""
        of_names = views(self._primitives, self._inputs)
        places = tuple(of_names.get(name, -1) for name in self._names)
        return places if max(places, default=-1) >= 0 else ()

    @cached_property
    def allocated_bytes(self) -> int:
        """All of MLX's allocations for the graph, less its outputs."""
        return allocated_bytes(self._primitives, self._names)


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
