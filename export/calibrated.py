"""Writing a model's tensors while rows of tokens run through it, block by block.

The matrices of a product are quantized for the inputs that reach it, and the pass goes on with
their quantized values.
"""

from __future__ import annotations

from export.cut.model import Cut
from export.passes.block_pass import RowPass, RowProducts
from export.quantize.calibrate import Calibration
from export.stored import QuantizedForm
from export.tensors import Tensors
from runtime.arrays.stored import Block


def write_calibrated(tensors: Tensors, cut: Cut, rows: RowPass, calibration: Calibration) -> None:
    """Write all tensors, in the order of the blocks.

    Tied embeddings are written with the head, whose inputs they are quantized for.
    """
    first, *layers, last = cut.blocks
    (head,) = rows.head().names
    tied = head in _matrices(cut, first)
    tensors.writer.align_block()
    _write_vectors(tensors, cut, first)
    for name in _matrices(cut, first):
        if not tied:
            tensors.matrix(name)
    rows.embed()
    for index, block in enumerate(layers, start=1):
        tensors.writer.align_block()
        _write_vectors(tensors, cut, block)
        for products in rows.layer(index):
            _write_products(tensors, products, calibration)
    tensors.writer.align_block()
    _write_vectors(tensors, cut, last)
    _write_products(tensors, rows.head(), calibration, tied)
    tensors.writer.align_block()


def _write_products(
    tensors: Tensors, products: RowProducts, calibration: Calibration, tied: bool = False
) -> None:
    """Write the matrices of a product, quantized for its inputs where they are quantized at all."""
    names = [name for name in products.names if tensors.is_quantized(name)]
    factor = calibration.factor(products, tied) if names else None
    for name in products.names:
        form = tensors.stored[name]
        if factor is None or name not in names:
            tensors.matrix(name)
        else:
            assert isinstance(form, QuantizedForm)
            tensors.packed(name, calibration.slices(name, form, factor, tensors))


def _matrices(cut: Cut, block: Block) -> tuple[str, ...]:
    operations = cut.block_types[block.type].operations
    return tuple(name for one in operations for name in one.matrices(block.tensor))


def _write_vectors(tensors: Tensors, cut: Cut, block: Block) -> None:
    """Write a block's norms and biases."""
    block_type = cut.block_types[block.type]
    for name, shape in block_type.parameters.items():
        tensors.vector(block.tensor(name), shape)
    for operation in block_type.operations:
        for name in operation.vectors(block.tensor):
            tensors.vector(name, tensors.checkpoint.shape(name))
