"""Compiled code for tests: where it runs, and in a cache folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest

from runtime.arrays.stored import Extent, Matrix
from runtime.arrays.stored_codes import Stored
from runtime.arrays.weight_source import QuantizedTile
from runtime.machine.machine_code import lacking
from support.bundles import Rng


def require_compiled() -> None:
    """Skip the test where code of LLVM cannot be compiled or run."""
    if why := lacking():
        pytest.skip(why)


def machine_code_for(processor: str, text: str, readable: bool = False) -> Any:
    """The object file of a text for a processor, which need not be here, or its assembly."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()  # of the call of the system
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(processor, opt=3, reloc="pic", codemodel="small")
    return (machine.emit_assembly if readable else machine.emit_object)(llvm.parse_assembly(text))


class RandomMatrix:
    """A random matrix, of which any part is read where it lies, and as tiles are."""

    def __init__(
        self,
        rng: Rng,
        bits: int,
        layout: Literal["symmetric", "affine"],
        size: int,
        dtype: str,
        most: int = 40,
        least: int = 1,
    ) -> None:
        rows, self.groups = int(rng.integers(least, most)), int(rng.integers(1, 9))
        shape = (rows, self.groups * size * bits // 32)
        words = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
        drawn = [mx.array(rng.normal(size=(rows, self.groups))) for _ in range(2)]
        self.parts = [part.astype(getattr(mx, dtype)) for part in drawn]
        self.parts = self.parts if layout == "affine" else self.parts[:1]
        scales = Extent(0, 0, dtype, (rows, self.groups))
        biases = scales if layout == "affine" else None
        packed = Extent(0, 0, "uint32", shape)
        columns = self.groups * size
        self.matrix = Matrix(rows, columns, bits, size, layout, packed, scales, biases)
        halves = (part if dtype == "float32" else part.view(mx.uint16) for part in self.parts)
        self.stored = (words, *map(np.asarray, halves))

    @contextmanager
    def mapped(self, matrix: Matrix, start: int, stop: int, by_columns: bool) -> Iterator[Stored]:
        def taken(part: np.ndarray) -> np.ndarray:
            first, last = (at * part.shape[1] // matrix.columns for at in (start, stop))
            return part[:, first:last] if by_columns else part[start:stop]

        yield tuple(map(taken, self.stored))

    def tile(self, start: int, stop: int, by_columns: bool) -> QuantizedTile:
        with self.mapped(self.matrix, start, stop, by_columns) as (words, *_):
            size = self.matrix.group_size
            of_groups = slice(start // size, stop // size)
            where = (slice(None), of_groups) if by_columns else slice(start, stop)
            scales, *biases = (part.astype(mx.float32)[where] for part in self.parts)
            shift = biases[0] + scales * 2.0 ** (self.matrix.bits - 1) if biases else None
            return QuantizedTile(mx.array(words), scales, shift)

    def part(self, rng: Rng, by_columns: bool) -> tuple[int, int]:
        """Some of its rows, or of its columns."""
        size = self.matrix.group_size if by_columns else 1
        count = self.groups if by_columns else self.matrix.rows
        start, stop = sorted(rng.choice(count + 1, 2, replace=False).tolist())
        return start * size, stop * size
