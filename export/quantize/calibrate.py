"""Calibrated quantization: each matrix is quantized for the inputs that it will see.

A pass takes the calibration rows through the model, block by block. Before each product it collects
the Gram matrix X^T X of the inputs, quantizes the matrices of that product by GPTQ
(arXiv 2210.17323), and goes on with the quantized values, so that later matrices can make up for
the errors of earlier ones. The head of a model with tied embeddings is quantized last; its Gram
matrix is scaled to a mean diagonal of 1, and the identity is added for the lookup of single rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from export.packed import F32, Packing
from export.quantize.gptq import Factor, gptq, gptq_bytes, prepare, prepare_bytes
from export.quantize.gram import ALIGN, Gram, add_bytes, gram_bytes, tied_hessian
from export.quantize.search import Quantized
from export.sources.source import SLICE_VALUES
from ondevice.engine import Products
from ondevice.errors import BudgetError, DataError
from ondevice.units import format_bytes

DAMPING, DAMPING_OF_FEW = 0.01, 0.1
FEW_ROWS = 8  # below which the damping of few rows is used


class Source(Protocol):
    """The matrices to quantize."""

    def ranges(self, name: str) -> Iterator[tuple[int, int]]:
        """The slices of rows in which to read a matrix."""

    def source_rows(self, name: str, start: int, stop: int) -> F32:
        """Rows (stop - start, C) of a matrix."""


@dataclass(frozen=True)
class Calibration:
    """How matrices are quantized for their inputs.

    rows: how many rows of tokens the inputs come from. spare_bytes: memory for Gram matrices and
    their factors.
    """

    rows: int
    spare_bytes: int

    def factor(self, products: Products, tied: bool = False) -> Factor:
        """The factor of the Gram matrix of a product's inputs."""
        inputs = products.inputs()
        first = next(inputs)
        columns = first.shape[1]
        gram = Gram(columns, self.block(columns))
        gram.add(first)
        for x in inputs:
            gram.add(x)
        try:
            return prepare(tied_hessian(gram) if tied else gram, self.damping)
        except DataError as problem:
            raise DataError(f"{', '.join(products.names)}: {problem}") from None

    @property
    def damping(self) -> float:
        """The share of the mean diagonal that is added to the diagonal."""
        return DAMPING if self.rows >= FEW_ROWS else DAMPING_OF_FEW

    def block(self, columns: int) -> int:
        """How many columns share one Gram matrix: all, or as many as memory allows.

        Raises:
            BudgetError: not even the smallest blocks fit.
        """
        block = columns
        while block > ALIGN and needed_bytes(columns, block) > self.spare_bytes:
            block = -(-block // 2 // ALIGN) * ALIGN
        if needed_bytes(columns, block) > self.spare_bytes:
            raise BudgetError(
                f"calibrating a matrix of {columns} columns needs "
                f"{format_bytes(needed_bytes(columns, block), up=True)} besides the model, but "
                f"{format_bytes(self.spare_bytes)} are left; give a larger --budget"
            )
        return block

    def slices(
        self, name: str, packing: Packing, factor: Factor, source: Source
    ) -> Iterator[Quantized]:
        """A matrix, quantized slice by slice of rows."""
        for start, stop in source.ranges(name):
            yield gptq(source.source_rows(name, start, stop), factor, packing)


def needed_bytes(columns: int, block: int) -> int:
    """Bytes of a Gram matrix in blocks of columns, and of what is done with it at most."""
    rows = max(1, SLICE_VALUES // columns)
    largest = Packing(8, ALIGN // 4, "affine", "float32")
    quantizing = 4 * rows * columns + gptq_bytes(rows, columns, block, largest)
    most = max(add_bytes(columns, block), prepare_bytes(block), quantizing)
    return gram_bytes(columns, block) + most
