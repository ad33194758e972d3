"""Tracing functions into graphs: what they depend on, what they need, and their serialized form.

Every function here is a plain positional function over float32 arrays. Graphs are traced with
compilation disabled, so that helpers which mlx-lm compiles are inlined as primitives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

Function = Callable[..., list[mx.array]]


@dataclass(frozen=True)
class Trace:
    """A traced graph: per output the positions of the inputs it depends on, and a signature.

    `passes[i]` is the input that output i is, untouched, or None. `signature` is equal for equal
    computations (primitives, arguments, shapes, constants), whatever names the tracer gave.
    `workspace_bytes` bounds the intermediates alive at once when they are evaluated in order,
    outputs excluded.
    """

    depends: tuple[frozenset[int], ...]
    passes: tuple[int | None, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    signature: str
    workspace_bytes: int


def _record(function: Function, inputs: Sequence[mx.array]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    mx.disable_compile()
    try:
        mx.export_function(events.append, function, *inputs)
    finally:
        mx.enable_compile()
    return events


def trace(function: Function, inputs: Sequence[mx.array]) -> Trace:
    """Trace `function` at the shapes of `inputs` without evaluating it."""
    number: dict[str, int] = {}
    arguments: set[str] = set()
    reach: dict[str, frozenset[int]] = {}
    digest = hashlib.sha256()
    primitives: list[dict[str, Any]] = []
    outputs: list[tuple[str, tuple[int, ...], Any]] = []

    def note(*parts: Any) -> None:
        digest.update(repr(parts).encode())

    for event in _record(function, inputs):
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
        output_shapes=tuple(tuple(shape) for _, shape, _ in outputs),
        signature=digest.hexdigest(),
        workspace_bytes=_workspace(primitives, {name for name, _, _ in outputs}),
    )


VIEWS = {"Broadcast", "Reshape", "Transpose", "Squeeze", "ExpandDims", "Flatten", "Unflatten"}


def _workspace(primitives: list[dict[str, Any]], outputs: set[str]) -> int:
    """Peak bytes of intermediates when primitives run in order and die at their last use."""
    owner: dict[str, str] = {}
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, primitive in enumerate(primitives):
        for name, _, _ in primitive["inputs"]:
            last[owner.get(name, name)] = index
        for name, shape, dtype in primitive["outputs"]:
            if primitive["name"] in VIEWS:
                source = primitive["inputs"][0][0]
                owner[name] = owner.get(source, source)
            else:
                size[name] = 0 if name in outputs else math.prod(shape) * dtype.size
    kept = {owner.get(name, name) for name in outputs}
    alive, peak = 0, 0
    freed_at: dict[int, int] = {}
    for index, primitive in enumerate(primitives):
        for name, _, _ in primitive["outputs"]:
            if name in size and name not in kept:
                alive += size[name]
                end = last.get(name, index)
                freed_at[end] = freed_at.get(end, 0) + size[name]
        peak = max(peak, alive)
        alive -= freed_at.get(index, 0)
    return peak


def serialize(path: Path, function: Function, inputs: Sequence[mx.array]) -> None:
    """Write `function` at the shapes of `inputs` as an MLX exported function."""
    mx.disable_compile()
    try:
        mx.export_function(str(path), function, *inputs)
    finally:
        mx.enable_compile()
