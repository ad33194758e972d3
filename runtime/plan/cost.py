"""Seconds that a row takes by a plan on a CPU, roughly: to compare plans, not to promise times.

The constants were measured with the shapes of Qwen2.5 0.5B, LFM2 350M, Gemma 3 1B and Qwen3.5 0.8B
on two cores of an Intel Sapphire Rapids. On other processors seconds differ, and which of two plans
is faster hardly does. Work on values alone, as norms, is the same in all plans and not counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.arrays.stored import Matrix
from runtime.operations.execution import Execution
from runtime.plan.lower import LoweredBlock, LoweredModel

OPERATION_S = 1 / 275e9  # of a product
EDGE = 20  # a product with n rows, columns or tokens takes as long as one with n + EDGE
DEQUANTIZED_S = 0.9e-9  # a value
COMPILED_S = 0.45e-9  # a value dequantized to bfloat16 by compiled code, reading included
IN_CACHE_S = 0.1e-9  # a value dequantized for a product that is computed at once
READ_S = 0.35e-9  # a byte
TILE_S = 300e-6  # what waits between the products with two tiles
QUERIES_S = 800e-6  # the same of a block of queries, forward or backward


def seconds(
    model: LoweredModel, backward: bool, lanes: int, kept: int = 0, materialized: int = 0
) -> float:
    """A row's forward, with `backward` also its backward, where the last `kept` layers keep values.

    The first `materialized` layers stay dequantized. Of `lanes` rows that run together each takes
    its share of reading and dequantizing.
    """
    execution, layers = model.execution, model.layers
    known: dict[tuple[int, bool, bool], float] = {}
    total = 0.0
    for index, layer in enumerate(layers):
        stays, keeps = index < materialized, index >= len(layers) - kept
        key = (layer.alike, stays, keeps)
        if key not in known:
            passes = _passes(layer, execution, backward, keeps)
            known[key] = _layer_seconds(passes, execution, 0 if stays else 1 / lanes)
        total += known[key]
    if not execution.in_map:  # where attention is not compiled
        blocks = -(-execution.bucket // execution.attention_block)
        total += len(layers) * blocks * QUERIES_S * (2 if backward else 1)
    return total + _head_seconds(model, backward, lanes)


def _layer_seconds(
    passes: Iterator[tuple[Matrix, int, int, float]], execution: Execution, loading: float
) -> float:
    """The products with a layer's matrices, and a share `loading` of reading and dequantizing."""
    total = 0.0
    for matrix, height, width, products in passes:
        tiles = matrix.rows * matrix.columns / (height * width)
        total += _product_seconds(execution.bucket, height, width, products) * tiles
        total += _loading_seconds(matrix, execution) * loading
    return total


def _passes(
    layer: LoweredBlock, execution: Execution, backward: bool, keeps: bool
) -> Iterator[tuple[Matrix, int, int, float]]:
    """Each pass over a matrix: its tiles' rows and columns, and the products with each tile."""
    forward = layer.keeping if keeps else layer.forward
    further = (layer.backward_kept if keeps else layer.backward) if backward else ()
    for instruction in (*forward, *further):
        operation = instruction.operation
        for name in operation.multiplied(layer.block.tensor):
            matrix = execution.tables.matrices[name]
            height, width = execution.tile_shape(name, instruction.backward)
            yield matrix, height, width, operation.products_with_each(instruction.backward)


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
    if execution.in_map and not matrix.is_float:
        return matrix.rows * matrix.columns * IN_CACHE_S
    if execution.compiled and not matrix.is_float:
        return matrix.rows * matrix.columns * COMPILED_S
    return matrix.rows * matrix.columns * DEQUANTIZED_S + matrix.nbytes * READ_S
