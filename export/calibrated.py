"""Calibrated quantization: each matrix is quantized for the inputs that it will see.

A pass takes the calibration rows through the model, block by block. Before each product it collects
the Gram matrix X^T X of the inputs, quantizes and writes the matrices of that product by GPTQ
(arXiv 2210.17323), and goes on with the quantized values, so that later matrices can make up for
the errors of earlier ones. The head of a model with tied embeddings is quantized last; its Gram
matrix is scaled to a mean diagonal of 1, and the identity is added for the lookup of single rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from export.cut.model import Cut
from export.passes.block_pass import RowPass, RowProducts
from export.quantize.gptq import Factor, gptq, gptq_bytes, prepare, prepare_bytes
from export.quantize.gram import ALIGN, Gram, add_bytes, gram_bytes, tied_hessian
from export.quantize.nearest import Quantized
from export.sources.source import SLICE_VALUES
from export.stored import QuantizedForm
from export.tensors import Tensors
from runtime.arrays.stored import Block
from runtime.core.errors import DataError

DAMPING, DAMPING_OF_FEW = 0.01, 0.1
FEW_TOKENS = 2048  # below which the damping of few tokens is used


@dataclass
class Calibration:
    """How matrices are quantized for their inputs.

    tokens: of the inputs. block: the most columns that share one Gram matrix. largest_damping: the
    largest that any matrix has needed so far.
    """

    tokens: int
    block: int
    largest_damping: float = 0.0

    def factor(self, products: RowProducts, tied: bool = False) -> Factor:
        """The factor of the Gram matrix of a product's inputs.

        Raises:
            DataError: the inputs are not finite, or too large.
        """
        assert products.inputs is not None
        inputs = products.inputs()
        first = next(inputs)
        gram = Gram(first.shape[1], self.block)
        gram.add(first)
        for x in inputs:
            gram.add(x)
        try:
            factor = prepare(tied_hessian(gram) if tied else gram, self.damping)
        except DataError as problem:
            raise DataError(f"{', '.join(products.names)}: {problem}") from None
        self.largest_damping = max(self.largest_damping, factor.damping)
        return factor

    @property
    def damping(self) -> float:
        """The share of the mean diagonal that is added to the diagonal."""
        return DAMPING if self.tokens >= FEW_TOKENS else DAMPING_OF_FEW

    def needed_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the Gram matrix of a matrix (R, C), and the most that is used beside it."""
        block, slice_rows = min(self.block, columns), min(rows, max(1, SLICE_VALUES // columns))
        largest = QuantizedForm(8, ALIGN // 4, "affine", "float32")
        quantizing = 4 * slice_rows * columns + gptq_bytes(slice_rows, columns, block, largest)
        most = max(add_bytes(columns, block), prepare_bytes(block), quantizing)
        return gram_bytes(columns, block) + most


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
    seen = products.inputs is not None
    names = [name for name in products.names if seen and tensors.is_quantized(name)]
    factor = calibration.factor(products, tied) if names else None
    for name in products.names:
        if factor is None or name not in names:
            tensors.matrix(name)
        else:
            tensors.write_quantized(name, _slices(tensors, name, factor))


def _slices(tensors: Tensors, name: str, factor: Factor) -> Iterator[Quantized]:
    """A matrix, quantized slice by slice of rows."""
    form = tensors.stored[name]
    assert isinstance(form, QuantizedForm)
    for start, stop in tensors.ranges(name):
        yield gptq(tensors.source_rows(name, start, stop), factor, form)


def _matrices(cut: Cut, block: Block) -> tuple[str, ...]:
    operations = cut.block_types[block.type].operations
    return tuple(name for operation in operations for name in operation.matrices(block.tensor))


def _write_vectors(tensors: Tensors, cut: Cut, block: Block) -> None:
    """Write a block's norms and biases."""
    block_type = cut.block_types[block.type]
    for name, shape in block_type.parameters.items():
        tensors.vector(block.tensor(name), shape)
    for operation in block_type.operations:
        for name in operation.vectors(block.tensor):
            tensors.vector(name, tensors.checkpoint.shape(name))
