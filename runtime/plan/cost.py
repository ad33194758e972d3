"""Seconds that a row takes by a plan on a CPU, roughly: to compare plans, not to promise times.

The constants were measured with Qwen2.5 0.5B's shapes on two cores of an Intel Sapphire Rapids. On
other processors seconds differ, and which of two plans is faster hardly does.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.arrays.stored import Matrix
from runtime.operations.base import Execution
from runtime.plan.lower import LoweredBlock, LoweredModel

OPERATION_S = 1 / 290e9  # of a product
EDGE = 20  # a product with n rows, columns or tokens takes as long as one with n + EDGE
DEQUANTIZED_S = 0.9e-9  # a value
READ_S = 0.35e-9  # a byte
# Of each of several threads that multiply side by side: of a product, and a value, read and
# dequantized for each product
THREAD_OPERATION_S, THREAD_VALUE_S = 1 / 138e9, 1.1e-9
HIDDEN_S = (
    85e-9  # a value of hidden states in a layer, forward: all that is no product with weights
)
TILE_S = 150e-6  # what waits between the products with two tiles
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
            of_layer = _passes(layer, execution, backward, keeps)
            known[key] = _layer_seconds(of_layer, execution, lanes, stays)
        total += known[key]
    blocks = -(-execution.bucket // execution.attention_block)
    passes = 3 if backward else 1  # a backward pass takes twice as long
    total += len(layers) * execution.bucket * execution.tables.hidden_size * HIDDEN_S * passes
    total += len(layers) * blocks * QUERIES_S * (2 if backward else 1)
    return total + _head_seconds(model, backward, lanes)


def _layer_seconds(
    passes: Iterator[tuple[Matrix, int, int, float]], execution: Execution, lanes: int, stays: bool
) -> float:
    """The products with a layer's matrices, which `stays` says are dequantized already."""
    total = 0.0
    for matrix, height, width, products in passes:
        if execution.threads > 1:
            total += _seconds_of_threads(matrix, products, execution, lanes, stays)
            continue
        tiles = matrix.rows * matrix.columns / (height * width)
        total += _product_seconds(execution.bucket, height, width, products) * tiles
        total += 0.0 if stays else _loading_seconds(matrix) / lanes
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
        if execution.threads > 1:
            products = 2 if backward else 1
            total += _seconds_of_threads(matrix, products, execution, lanes * products)
            continue
        height = min(matrix.rows, execution.chunk_rows)
        chunk = _product_seconds(execution.bucket, height, matrix.columns, 2 if backward else 1)
        total += chunk * matrix.rows / height + _loading_seconds(matrix) / lanes
    return total


def _seconds_of_threads(
    matrix: Matrix, products: float, execution: Execution, lanes: int, stays: bool = False
) -> float:
    """Products with a whole matrix, which is dequantized for each of them unless it stays so."""
    operations = 2.0 * (execution.bucket + EDGE) * THREAD_OPERATION_S
    value = operations + (0.0 if stays else THREAD_VALUE_S / lanes)
    return products * matrix.rows * matrix.columns * value / execution.threads


def _product_seconds(tokens: int, height: int, width: int, products: float) -> float:
    """The products of so many tokens with one tile."""
    operations = 2.0 * (tokens + EDGE) * (height + EDGE) * (width + EDGE)
    return products * operations * OPERATION_S + TILE_S


def _loading_seconds(matrix: Matrix) -> float:
    return matrix.rows * matrix.columns * DEQUANTIZED_S + matrix.nbytes * READ_S
