"""Writing a checkpoint's tensors to a bundle, a slice of rows at a time, and reading them back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from export.cut.model import Cut
from export.quantize.search import Quantized, quantize_rows
from export.sources.source import Checkpoint, slices
from export.stored import F32, FloatForm, QuantizedForm, QuantizedRows, StoredForm
from runtime.arrays.stored import Extent, Matrix
from runtime.bundle.store import BundleWriter
from runtime.core.errors import BundleError
from runtime.core.notes import Progress


class Tensors:
    """Writes tensors to a bundle, and remembers where each is.

    `stored` says how each matrix is stored, and `kept` which of them keep the integers of a
    quantized checkpoint. As a reader of rows it gives the values of a matrix as the bundle holds
    them, once it is written, and those of the checkpoint before.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        writer: BundleWriter,
        stored: dict[str, StoredForm],
        kept: frozenset[str],
        progress: Progress,
    ) -> None:
        self.checkpoint, self.writer, self.stored = checkpoint, writer, stored
        self.kept, self.progress = kept, progress
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Extent] = {}
        self._done = 0
        self._total = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())

    def rows(self, name: str, start: int, stop: int) -> F32:
        """Rows of the tensor `name`, (n, C) or (n,), see above."""
        written = self.matrices.get(name.removesuffix(".weight"))
        if written is None or written.scales is None:
            return self.checkpoint.rows(name, start, stop)
        form = self.stored[name.removesuffix(".weight")]
        assert isinstance(form, QuantizedForm)
        words, scales = (
            self._written(extent, start, stop) for extent in (written.packed, written.scales)
        )
        biases = None if written.biases is None else self._written(written.biases, start, stop)
        return QuantizedRows(words, scales, biases).values(form)

    def _written(self, extent: Extent, start: int, stop: int) -> npt.NDArray[Any]:
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
            for operation in block_type.operations:
                vectors = operation.vectors(block.tensor)
                for name in operation.matrices(block.tensor):
                    self.matrix(name)
                    if (bias := f"{name}.bias") in vectors:
                        self.vector(bias, self.checkpoint.shape(bias))
        self.writer.align_block()

    def is_quantized(self, name: str) -> bool:
        """Whether a matrix is quantized here, and neither copied nor kept in floating point."""
        return isinstance(self.stored[name], QuantizedForm) and name not in self.kept

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
            self._plain(name, stored)
        elif self.is_quantized(name):
            self.packed(name, self._rounded(name, stored))
        else:
            exact = self.checkpoint.packed_exactly(f"{name}.weight")
            self.packed(name, self._copied(name), measured=not exact)

    def packed(self, name: str, parts: Iterable[Quantized], measured: bool = True) -> None:
        """Write a quantized matrix, given its rows slice by slice.

        `measured` says whether they come with the errors of quantization.
        """
        form = self.stored[name]
        assert isinstance(form, QuantizedForm)
        rows, columns = self.checkpoint.shape(f"{name}.weight")
        scales: list[bytes] = []
        biases: list[bytes] = []
        squares = errors = peak = 0.0

        def words() -> Iterator[bytes]:
            nonlocal squares, errors, peak
            for one in parts:
                if one.overflows:
                    raise BundleError(
                        f"{name}.weight holds values too large for {form.scale_dtype} scales: "
                        f"{self.checkpoint.remedy}"
                    )
                scales.append(one.rows.scales.astype(form.scale_dtype).tobytes())
                if one.rows.biases is not None:
                    biases.append(one.rows.biases.astype(form.scale_dtype).tobytes())
                squares += one.square_sum
                errors += one.error_sum
                peak = max(peak, one.error_max)
                yield one.rows.words.tobytes()
                self._advance(name, len(one.rows.words) * columns)

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
            _errors(squares, errors, peak, rows * columns) if measured else {},
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

    def _copied(self, name: str) -> Iterator[Quantized]:
        """The matrix as the checkpoint packs it, with the errors where that is not exact."""
        tensor = f"{name}.weight"
        is_exact = self.checkpoint.packed_exactly(tensor)
        form = self.stored[name]
        assert isinstance(form, QuantizedForm)
        for start, stop in self.ranges(name):
            rows = self.checkpoint.packed_rows(tensor, start, stop)
            for numbers in (rows.scales, rows.biases):
                if numbers is not None:
                    _check(tensor, numbers, start)
            if is_exact:
                yield Quantized(rows, 0.0, 0.0, 0.0)
                continue
            values = self.checkpoint.rows(tensor, start, stop)
            difference = rows.values(form) - values
            yield Quantized(
                rows,
                float(np.square(values, dtype=np.float64).sum()),
                float(np.square(difference, dtype=np.float64).sum()),
                float(np.abs(difference).max(initial=0.0)),
            )

    def _plain(self, name: str, stored: FloatForm) -> None:
        """Write a matrix in floating point."""
        rows, columns = self.checkpoint.shape(f"{name}.weight")
        squares = errors = peak = 0.0

        def parts() -> Iterator[bytes]:
            nonlocal squares, errors, peak
            for start, stop in self.ranges(name):
                value = self.source_rows(name, start, stop)
                rounded = stored.rounded(value)
                error = value - rounded.astype(np.float32)
                if not np.isfinite(error).all():
                    raise BundleError(
                        f"{name}.weight holds values too large for {stored.dtype}, up to "
                        f"{np.abs(value).max():.3g}; use --bits 32"
                    )
                squares += float(np.square(value, dtype=np.float64).sum())
                errors += float(np.square(error, dtype=np.float64).sum())
                peak = max(peak, float(np.abs(error).max(initial=0.0)))
                yield rounded.tobytes()
                self._advance(name, value.size)

        extent = self.writer.tensor(parts(), stored.dtype, (rows, columns))
        error = _errors(squares, errors, peak, rows * columns) if errors else {}
        self.matrices[name] = Matrix(rows, columns, stored.bits, 0, "float", extent, error=error)

    def _advance(self, name: str, values: int) -> None:
        self._done += values
        self.progress(name, self._done, self._total)


def _errors(squares: float, errors: float, peak: float, values: int) -> dict[str, float]:
    return {
        "relative_rms": math.sqrt(errors / squares) if squares else 0.0,
        "rms": math.sqrt(errors / values),
        "max": peak,
    }


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
