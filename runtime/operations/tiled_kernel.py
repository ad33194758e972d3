"""The tiled kernel: runs the operations inside on one tile of tokens after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from runtime.arrays.values import Gradients, Loras, Values, move_of
from runtime.operations.kernel import Run, Tools
from runtime.operations.program import Body
from runtime.operations.tiled import Tiled
from runtime.operations.values import gradient_of, shape_at


@dataclass(frozen=True)
class TiledKernel:
    """The `Tiled` operation; the backward of each tile first recomputes its values."""

    tools: Tools

    def forward(self, run: Run, lanes: list[Values], loras: Sequence[Loras]) -> None:
        operation, body = run.operation(Tiled), _body(run)
        (source,), (result,) = operation.inputs, operation.outputs
        ys = [mx.zeros(shape_at(run.program.values[result], run.tokens)) for _ in lanes]
        self.tools.arrays.settle(ys)
        for tile in _tiles(run, body):
            inside = [{source: values[source][:, tile]} for values in lanes]
            run.executor.forward(
                run.block,
                body.program,
                body.instructions,
                body.tokens,
                inside,
                [_after(lora, tile.start) for lora in loras],
            )
            for y, values in zip(ys, inside, strict=True):
                self.tools.arrays.put(y, (slice(None), tile), values.pop(result))
        for values in lanes:
            values[result] = ys.pop(0)

    def backward(self, run: Run, values: Values, loras: Loras, gradients: Gradients) -> Values:
        operation, body = run.operation(Tiled), _body(run)
        (source,), (result,) = operation.inputs, operation.outputs
        x, dy = values[source], values.pop(gradient_of(result))
        dx = mx.zeros(x.shape) if run.instruction.wanted else None
        for name in operation.adaptable:
            if name in loras:  # there before the tiles, not in the holes that they leave
                a, b = loras[name].a, loras[name].b
                gradients[name] = (mx.zeros(a.shape), mx.zeros(b.shape))
        self.tools.arrays.settle(dx if dx is not None else [], gradients)
        for tile in _tiles(run, body):
            inside = {source: x[:, tile], gradient_of(result): dy[:, tile]}
            run.executor.reverse(
                run.block,
                body.program,
                body.instructions,
                body.tokens,
                inside,
                _after(loras, tile.start),
                gradients,
            )
            if dx is not None:
                part = inside.pop(gradient_of(source))
                self.tools.arrays.put(dx, (slice(None), tile), part)
        return {} if dx is None else {source: dx}


def _body(run: Run) -> Body:
    body = run.instruction.body
    assert body is not None  # the lowering gives it to every instruction of this operation
    return body


def _after(loras: Loras, tokens: int) -> Loras:
    """The adapters for the tile that begins after so many tokens."""
    if move_of(loras) is not None:
        return loras  # every token sees the same weights
    return {name: lora.after(tokens) for name, lora in loras.items()}


def _tiles(run: Run, body: Body) -> Iterator[slice]:
    for start in range(0, run.tokens, body.tokens):
        yield slice(start, start + body.tokens)
