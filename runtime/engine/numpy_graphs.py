"""A serialized function replayed by NumPy, primitive by primitive, for the few values of a token.

MLX takes longer to begin a primitive and to wait for its end than NumPy takes to compute it.
Primitives are those that `mx.export_function` reports. The reference is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Function = Callable[..., Sequence[mx.array]]
ALIKE: dict[str, Callable[..., Any]] = {  # value by value; NumPy broadcasts
    name: getattr(np, name.lower())
    for name in (
        *("Add", "Cos", "Divide", "Exp", "Maximum", "Minimum", "Multiply"),
        *("Negative", "Power", "Sin", "Square", "Subtract", "Tanh"),
    )
}
SHAPED = ("ExpandDims", "Flatten", "Reshape", "Squeeze", "Unflatten")
DTYPES = {mx.float32: np.float32, mx.int32: np.int32}
SUM = 2  # of the kinds of Reduce


class UnknownPrimitiveError(Exception):
    """A primitive that is not replayed."""


class Replay:
    """The replayed function. Arrays that it returns may share memory with arguments.

    Raises:
        UnknownPrimitiveError: it has a primitive that is not replayed.
    """

    def __init__(self, function: Function, inputs: Sequence[mx.array]) -> None:
        mx.eval(function(*inputs))  # reads the constants; a trace refuses those that are not read
        events: list[dict[str, Any]] = []
        mx.export_function(events.append, lambda *given: function(*given), *inputs)
        parts = {event["type"]: event for event in events}
        self._makers = {
            name: (event, number)
            for event in events
            if event["type"] == "primitive"
            for number, (name, _, _) in enumerate(event["outputs"])
        }
        # of constants, and until all steps are known, of the examples
        self._values: list[Any] = [np.asarray(array) for array in inputs]
        self._places = {name: at for at, (name, _, _) in enumerate(parts["inputs"]["inputs"])}
        self._arguments = len(inputs)
        self._steps: list[tuple[Callable[..., Any], list[int], int]] = []
        self._known: dict[str, int] = {}
        self._constant = set[int]()
        for name, value in parts["constants"]["constants"]:
            known = value if value.dtype in DTYPES else value.astype(mx.float32)
            self._places[name] = self._new(np.asarray(known), constant=True)
        outputs = parts["outputs"]["outputs"]
        self._outputs = [self._whole(name, shape) for name, shape, _ in outputs]
        for at in range(len(self._values)):
            if at not in self._constant:
                self._values[at] = None
        last = {source: at for at, (_, sources, _) in enumerate(self._steps) for source in sources}
        stay = self._constant.union(self._outputs)
        self._frees = [
            [source for source in {*sources} - stay if last[source] == at]
            for at, (_, sources, _) in enumerate(self._steps)
        ]
        del self._makers, self._places, self._known  # the trace, which takes 0.6 MB in Gemma 3 1B

    def __call__(self, *arguments: Array) -> list[Array]:
        """The function's results of arguments of the shapes that it was traced at."""
        values = self._values.copy()
        values[: self._arguments] = arguments
        for (function, sources, place), frees in zip(self._steps, self._frees, strict=True):
            values[place] = function(*[values[source] for source in sources])
            for source in frees:
                values[source] = None
        return [values[place] for place in self._outputs]

    def _new(self, value: Array, constant: bool) -> int:
        self._values.append(value)
        if constant:
            self._constant.add(len(self._values) - 1)
        return len(self._values) - 1

    def _step(self, key: str, function: Callable[..., Any], sources: list[int]) -> int:
        """The place of a function's result; equal steps are one, and constants are no steps."""
        key = f"{key} {sources}"
        if key not in self._known:
            constant = self._constant.issuperset(sources)
            place = self._new(function(*[self._values[at] for at in sources]), constant)
            if not constant:
                self._steps.append((function, sources, place))
            self._known[key] = place
        return self._known[key]

    def _whole(self, name: str, shape: tuple[int, ...]) -> int:
        """The place of an array that has been broadcast to its shape."""
        place = self._place(name)
        if self._values[place].shape == tuple(shape):
            return place
        return self._step(f"Broadcast {shape}", lambda x: np.broadcast_to(x, shape), [place])

    def _place(self, name: str) -> int:
        """The place of an array, perhaps before it is broadcast."""
        if name not in self._places:
            event, number = self._makers[name]
            kind, arguments = event["name"], event["arguments"]
            alike = kind in ALIKE or kind in ("Broadcast", "AsType", "Sqrt")
            sources = [
                self._place(source) if alike else self._whole(source, shape)
                for source, shape, _ in event["inputs"]
            ]
            if kind == "Broadcast":
                self._places[name] = sources[0]
            else:
                _, shape, dtype = event["outputs"][number]
                function = _function(kind, arguments, number, tuple(shape), dtype)
                key = f"{kind} {arguments} {number} {dtype} {shape if kind in SHAPED else ''}"
                self._places[name] = self._step(key, function, sources)
        return self._places[name]


def _function(
    kind: str, arguments: Any, number: int, shape: tuple[int, ...], dtype: mx.Dtype
) -> Callable[..., Any]:
    """The primitive's result `number`, which has this shape and type."""
    if kind in ALIKE:
        return ALIKE[kind]
    if kind in SHAPED:
        return lambda x: x.reshape(shape)
    if kind == "Sqrt":
        return (lambda x: 1 / np.sqrt(x)) if arguments[0] else np.sqrt
    if kind == "AsType" and dtype in DTYPES:
        return lambda x: x.astype(DTYPES[dtype])
    if kind == "Arange" and dtype in DTYPES:
        values = np.arange(*arguments, dtype=DTYPES[dtype])
        return lambda: values
    if kind == "Reduce" and arguments[0] == SUM:
        axes = tuple(arguments[1])
        return lambda x: np.add.reduce(x, axis=axes, keepdims=True)
    if kind == "Transpose":
        return lambda x: x.transpose(arguments[0])
    if kind == "Concatenate":
        return lambda *parts: np.concatenate(parts, arguments[0])
    if kind == "Slice":
        taken = tuple(map(slice, *arguments))
        return lambda x: x[taken]
    if kind == "Split":
        return lambda x: np.split(x, arguments[0], arguments[1])[number]
    raise UnknownPrimitiveError(kind)
