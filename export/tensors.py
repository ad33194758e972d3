"""Writing a checkpoint's tensors to a bundle, a slice of rows at a time, and reading them back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from export.cut.model import Cut
from export.quantize.nearest import ErrorSums, Quantized, error_sums, quantize_rows, together
from export.sources.source import Checkpoint, slices
from export.stored import F32, FloatForm, QuantizedForm, QuantizedRows, StoredForm
from runtime.arrays.stored import Extent, Matrix
from runtime.bundle.store import BundleWriter
from runtime.core.errors import BundleError
from runtime.core.notes import Progress


class Tensors:
    """Writes tensors to a bundle, and remembers where each is.

    `stored` is the stored form of each matrix, and `copied` names those whose integers are copied
    from a quantized checkpoint. As a reader of rows it gives the values of a matrix as the bundle
    has them, once it is written, and those of the checkpoint before.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        writer: BundleWriter,
        stored: dict[str, StoredForm],
        copied: frozenset[str],
        progress: Progress,
    ) -> None:
        self.checkpoint, self.writer, self.stored = checkpoint, writer, stored
        self.copied, self.progress = copied, progress
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Extent] = {}
        self._done = 0
        self._total = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())

    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows of the tensor `name`, (n, C) or (n,), see above."""
        matrix = self.matrices.get(name.removesuffix(".weight"))
        if matrix is None or matrix.scales is None:
            return self.checkpoint.rows(name, start, stop)
        form = self.stored[name.removesuffix(".weight")]
        assert isinstance(form, QuantizedForm)
        words = self._written_rows(matrix.packed, start, stop)
        scales = self._written_rows(matrix.scales, start, stop)
        biases = None if matrix.biases is None else self._written_rows(matrix.biases, start, stop)
        return QuantizedRows(words, scales, biases).values(form)

    def _written_rows(self, extent: Extent, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows of a tensor that is in the weights file."""
        row = extent.nbytes // extent.shape[0]
        data = self.writer.read(extent.offset + start * row, (stop - start) * row)
        return np.frombuffer(data, extent.dtype).reshape(stop - start, -1)

    def write(self, cut: Cut) -> None:
        """Write all tensors, block after block."""
        for block in cut.blocks:
            self.writer.align_block()
            block_type = cut.block_types[block.type]
            for name, shape in block_type.parameters.items():
                self.vector(block.tensor(name), shape)
            # what is read whatever the tokens are lies together
            for operation in sorted(block_type.operations, key=lambda each: each.chosen_by_tokens):
                vectors = operation.vectors(block.tensor)
                for name in operation.matrices(block.tensor):
                    self.matrix(name)
                    if (bias := f"{name}.bias") in vectors:
                        self.vector(bias, self.checkpoint.shape(bias))
        self.writer.align_block()

    def is_quantized(self, name: str) -> bool:
        """Whether a matrix is quantized here, and neither copied nor stored as floats."""
        return isinstance(self.stored[name], QuantizedForm) and name not in self.copied

    def vector(self, name: str, shape: tuple[int, ...]) -> None:
        """Write a vector, unless it is there already."""
        if name in self.vectors:
            return
        value = self.checkpoint.rows(name, 0, shape[0])
        _check(name, value, 0)
        self.vectors[name] = self.writer.tensor([value.tobytes()], "float32", shape)
        self._advance(name, value.size)

    def matrix(self, name: str) -> None:
        """Write a matrix in its stored form, unless it is there already."""
        if name in self.matrices:
            return
        stored = self.stored[name]
        if isinstance(stored, FloatForm):
            self._write_floats(name, stored)
        elif self.is_quantized(name):
            self.write_quantized(name, self._rounded(name, stored))
        else:
            is_exact = self.checkpoint.quantized_exactly(f"{name}.weight")
            self.write_quantized(name, self._copied(name, stored, is_exact), measured=not is_exact)

    def write_quantized(self, name: str, parts: Iterable[Quantized], measured: bool = True) -> None:
        """Write a quantized matrix, given its rows slice by slice.

        `measured` says whether they come with the errors of quantization.
        """
        form = self.stored[name]
        assert isinstance(form, QuantizedForm)
        rows, columns = self.shape(name)
        scales: list[bytes] = []
        biases: list[bytes] = []
        sums: list[ErrorSums] = []

        def words() -> Iterator[bytes]:
            for quantized in parts:
                if quantized.overflows:
                    raise BundleError(
                        f"{name}.weight holds values too large for {form.scale_dtype} scales: "
                        f"{self.checkpoint.remedy}"
                    )
                part = quantized.rows
                scales.append(part.scales.astype(form.scale_dtype).tobytes())
                if part.biases is not None:
                    biases.append(part.biases.astype(form.scale_dtype).tobytes())
                sums.append((quantized.square_sum, quantized.error_sum, quantized.error_max))
                yield part.words.tobytes()
                self._advance(name, len(part.words) * columns)

        extent = self.writer.tensor(words(), "uint32", (rows, columns * form.bits // 32))
        groups = (rows, columns // form.group_size)
        self.matrices[name] = Matrix(
            rows,
            columns,
            form.bits,
            form.group_size,
            form.layout,
            extent,
            self.writer.tensor(scales, form.scale_dtype, groups),
            self.writer.tensor(biases, form.scale_dtype, groups) if biases else None,
            _facts(sums, rows * columns) if measured else {},
        )

    def ranges(self, name: str) -> Iterator[tuple[int, int]]:
        """The slices of rows in which a matrix is read and written."""
        return slices(*self.shape(name))

    def shape(self, name: str) -> tuple[int, int]:
        """(R, C) of a matrix."""
        rows, columns = self.checkpoint.shape(f"{name}.weight")
        return rows, columns

    def source_rows(self, name: str, start: int, stop: int) -> F32:
        """Rows of a matrix as the checkpoint has them, checked."""
        value = self.checkpoint.rows(f"{name}.weight", start, stop)
        _check(f"{name}.weight", value, start)
        return value

    def _rounded(self, name: str, form: QuantizedForm) -> Iterator[Quantized]:
        for start, stop in self.ranges(name):
            yield quantize_rows(self.source_rows(name, start, stop), form)

    def _copied(self, name: str, form: QuantizedForm, is_exact: bool) -> Iterator[Quantized]:
        """The integers of the checkpoint, with the errors where they are not exact."""
        tensor = f"{name}.weight"
        for start, stop in self.ranges(name):
            rows = self.checkpoint.quantized_rows(tensor, start, stop)
            for numbers in (rows.scales, rows.biases):
                if numbers is not None:
                    _check(tensor, numbers, start)
            if is_exact:
                yield Quantized(rows, 0.0, 0.0, 0.0)
                continue
            values = self.checkpoint.rows(tensor, start, stop)
            yield Quantized(rows, *error_sums(values, rows.values(form) - values))

    def _write_floats(self, name: str, stored: FloatForm) -> None:
        rows, columns = self.shape(name)
        sums: list[ErrorSums] = []

        def parts() -> Iterator[bytes]:
            for start, stop in self.ranges(name):
                value = self.source_rows(name, start, stop)
                rounded = stored.rounded(value)
                error = value - rounded.astype(np.float32)
                if not np.isfinite(error).all():
                    raise BundleError(
                        f"{name}.weight holds values too large for {stored.dtype}, up to "
                        f"{np.abs(value).max():.3g}; use --bits 32"
                    )
                sums.append(error_sums(value, error))
                yield rounded.tobytes()
                self._advance(name, value.size)

        extent = self.writer.tensor(parts(), stored.dtype, (rows, columns))
        facts = _facts(sums, rows * columns)
        error = facts if facts["rms"] else {}
        self.matrices[name] = Matrix(rows, columns, stored.bits, 0, "float", extent, error=error)

    def _advance(self, name: str, values: int) -> None:
        self._done += values
        self.progress(name, self._done, self._total)


def _facts(slices: Sequence[ErrorSums], values: int) -> dict[str, float]:
    """The manifest's entry about a matrix of so many values, whose errors were summed in slices."""
    square_sum, error_sum, error_max = together(slices)
    relative = math.sqrt(error_sum / square_sum) if square_sum else 0.0
    return {"relative_rms": relative, "rms": math.sqrt(error_sum / values), "max": error_max}


def _check(name: str, value: npt.NDArray[Any], row: int) -> None:
    """Raise BundleError if a value is not finite."""
    finite = np.isfinite(value)
    if not finite.all():
        at = np.argwhere(~finite)[0].tolist()
        at[0] += row
        raise BundleError(
            f"{name} holds {value[~finite][0]} at {at} ({(~finite).sum()} such values in this "
            "slice): the checkpoint is damaged, download or convert it again"
        )
