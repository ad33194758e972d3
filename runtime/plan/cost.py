"""Seconds that a row takes by a plan on a CPU, roughly: to compare plans, not to promise times.

The constants were measured with the shapes of Qwen2.5 0.5B, LFM2 350M, Gemma 3 1B and Qwen3.5 0.8B
on two cores of an Intel Sapphire Rapids. On other processors seconds differ, and which of two plans
is faster hardly does. Work on values alone, as norms, is counted only where it is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from runtime.arrays.stored import Matrix
from runtime.operations.execution import Execution
from runtime.operations.program import Instruction
from runtime.operations.values import shape_at
from runtime.plan.lower import Keeping, LoweredBlock, LoweredModel, way_of

OPERATION_S = 1 / 275e9  # of a product
EDGE = 20  # a product with n rows, columns or tokens takes as long as one with n + EDGE
DEQUANTIZED_S = 0.9e-9  # a value
IN_CACHE_S = 0.1e-9  # a value dequantized for a product that is computed at once
READ_S = 0.35e-9  # a byte
TILE_S = 300e-6  # what waits between the products with two tiles
QUERIES_S = 800e-6  # the same of a block of queries, forward or backward
VALUE_S = 1e-9  # a value that is recomputed without a product, roughly


def seconds(
    model: LoweredModel,
    backward: bool,
    lanes: int,
    kept: Sequence[int] = (),
    materialized: int = 0,
) -> float:
    """A row's forward, with `backward` also its backward, where the last layers keep values.

    `kept` says how many (see `way_of`). The first `materialized` layers stay dequantized. Of
    `lanes` rows that run together each takes its share of reading and dequantizing.
    """
    execution, layers = model.execution, model.layers
    known: dict[tuple[int, bool, int], float] = {}
    total = 0.0
    for index, layer in enumerate(layers):
        stays, way = index < materialized, way_of(len(layers) - index, kept)
        key = (layer.alike, stays, way)
        if key not in known:
            keeping, loading = layer.keeping[way] if backward else None, 0 if stays else 1 / lanes
            schedule = layer.forward if keeping is None else keeping.forward + keeping.backward
            known[key] = _layer_seconds(layer, schedule, execution, loading)
            if keeping is not None:
                known[key] += _recomputed_values(layer, keeping, execution) * VALUE_S
        total += known[key]
    return total + _head_seconds(model, backward, lanes)


def _recomputed_values(layer: LoweredBlock, keeping: Keeping, execution: Execution) -> int:
    """The values that a layer's backward recomputes without products, as norms."""
    return sum(
        math.prod(shape_at(layer.program.values[name], execution.bucket))
        for instruction in keeping.backward
        if instruction.operation.cheap and not instruction.backward
        for name in instruction.wanted
    )


def _layer_seconds(
    layer: LoweredBlock, schedule: Iterable[Instruction], execution: Execution, loading: float
) -> float:
    """Of a layer's products, and a share `loading` of reading and dequantizing their matrices.

    Each block of queries that attends adds a constant.
    """
    total = 0.0
    for instruction in schedule:
        operation, backward = instruction.operation, instruction.backward
        for name in operation.multiplied(layer.block.tensor):
            matrix = execution.tables.matrices[name]
            height, width = operation.taken(name, backward, execution)
            tiles = matrix.rows * matrix.columns / (height * width)
            products = operation.products_with_each(backward)
            total += _product_seconds(execution.bucket, height, width, products) * tiles
            total += _loading_seconds(matrix, execution) * loading
        if operation.by_queries:
            total += -(-execution.bucket // execution.queries) * QUERIES_S
    return total


def _head_seconds(model: LoweredModel, backward: bool, lanes: int) -> float:
    """One pass over the vocabulary for all tokens."""
    execution, last = model.execution, model.blocks[-1]
    if last.head is None:
        return 0.0
    total = 0.0
    for name in last.head.multiplied(last.block.tensor):
        matrix = execution.tables.matrices[name]
        height = min(matrix.rows, execution.chunk_rows)
        chunk = _product_seconds(execution.bucket, height, matrix.columns, 2 if backward else 1)
        total += chunk * matrix.rows / height + _loading_seconds(matrix, execution) / lanes
    return total


def _product_seconds(tokens: int, height: int, width: int, products: float) -> float:
    """The products of so many tokens with one tile."""
    operations = 2.0 * (tokens + EDGE) * (height + EDGE) * (width + EDGE)
    return products * operations * OPERATION_S + TILE_S


def _loading_seconds(matrix: Matrix, execution: Execution) -> float:
    if execution.compiled and not matrix.is_float:
        return matrix.rows * matrix.columns * IN_CACHE_S
    return matrix.rows * matrix.columns * DEQUANTIZED_S + matrix.nbytes * READ_S
