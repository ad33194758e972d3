"""Compiled dequantizing against the operations of NumPy and MLX, and in whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np
import pytest
from oracles import whole_model as reference
from oracles.bfloat16 import nearest
from support.bfloat16 import require_onednn
from support.bundles import Rng, Tiny
from support.compiled import require_compiled
from support.models import CLOSE, adapters_of, mebp, model_of, rows_of

from runtime.arrays import packed_rows
from runtime.arrays.arrays import CpuArrays
from runtime.arrays.compiled_dequantize import Dequantizing, Stored, text_of
from runtime.arrays.dequantize import dense, dequantize
from runtime.arrays.products import BufferProducts, Float32Products
from runtime.arrays.stored import Extent, Matrix
from runtime.arrays.weight_source import QuantizedTile
from runtime.machine.compiling_process import image
from runtime.machine.machine_code import compile_all
from runtime.machine.onednn import INSTRUCTIONS
from runtime.machine.openblas import OpenBlas
from runtime.machine.processor import cpu_flags

SIZES = (32, 64, 128)
SETTINGS = list(product((4, 8), SIZES, ("float16", "bfloat16", "float32"), ("symmetric", "affine")))
DTYPES = ("float32", "bfloat16") if cpu_flags() & INSTRUCTIONS else ("float32",)


@pytest.fixture(scope="module", autouse=True)
def compiled_at_once() -> None:
    """A process for each text would take 0.2 s."""
    require_compiled()
    kinds = product(SETTINGS, DTYPES)
    compile_all(text_of(*key[:3], key[3] == "affine", dtype) for key, dtype in kinds)


class RandomMatrix:
    """A random matrix, of which any part is read where it lies, and as tiles are."""

    def __init__(
        self, rng: Rng, bits: int, layout: Literal["symmetric", "affine"], size: int, dtype: str
    ) -> None:
        rows, self.groups = int(rng.integers(1, 40)), int(rng.integers(1, 9))
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


@pytest.mark.parametrize(("bits", "size", "scales", "layout"), SETTINGS)
def test_every_bit_is_that_of_the_reference(
    rng: Rng, bits: int, size: int, scales: str, layout: Literal["symmetric", "affine"]
) -> None:
    weights = RandomMatrix(rng, bits, layout, size, scales)
    matrix, arrays = weights.matrix, CpuArrays()
    for by_columns in (False, True):
        count, step = (weights.groups, size) if by_columns else (matrix.rows, 1)
        start, stop = sorted(rng.choice(count + 1, 2, replace=False) * step)
        tile = weights.tile(start, stop, by_columns)
        values, shift = Dequantizing(weights, "float32").tile(matrix, start, stop, by_columns)
        assert shift is None
        assert (values == np.array(dense(tile, bits, arrays))).all()
        if "bfloat16" not in DTYPES:
            continue
        halves, shift = Dequantizing(weights, "bfloat16").tile(matrix, start, stop, by_columns)
        rounded = nearest(dequantize(tile, bits, arrays)).view(np.uint32)
        assert (halves.astype(np.uint32) << 16 == rounded).all()
        assert (shift is None) == (tile.shift is None)
        if shift is not None and tile.shift is not None:
            assert (np.array(shift) == np.array(tile.shift)).all()


@pytest.mark.parametrize("processor", ["haswell", "znver3"])
def test_processors_without_bfloat16_read_such_scales(processor: str) -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(processor, opt=3, reloc="pic", codemodel="small")
    for bits, layout in product((4, 8), ("symmetric", "affine")):
        texts = (
            text_of(bits, 64, "bfloat16", layout == "affine", "float32"),
            packed_rows.text_of(bits, 64, layout, "bfloat16", 4),
        )
        for text in texts:
            assert image(machine.emit_object(llvm.parse_assembly(text)))


def test_products_of_buffers_are_those_of_mlx(rng: Rng) -> None:
    ours, other = BufferProducts(CpuArrays(), OpenBlas()), Float32Products(CpuArrays())
    for _ in range(8):
        tokens, rows, columns = (int(rng.choice([1, 2, 37, 64])) for _ in range(3))
        x, w, dy, onto = (
            mx.array(rng.normal(size=shape).astype(np.float32))
            for shape in ((tokens, columns), (rows, columns), (tokens, rows), (tokens, rows))
        )
        values = np.array(w)
        y = ours.by_columns(ours.factor(x), values, None)
        assert reference.relative_error(y, other.by_columns(x, w, None)) <= 1e-6
        dx = ours.by_rows(ours.factor(dy), values, None)
        assert reference.relative_error(dx, other.by_rows(dy, w, None)) <= 1e-6
        expected = np.array(other.by_columns(x, w, onto))
        sums = ours.by_columns(ours.factor(x), values, onto)
        assert reference.relative_error(sums, mx.array(expected)) <= 1e-6
        whole = mx.zeros((tokens, rows + 5))
        mx.eval(whole)
        ours.put(ours.factor(x), values, whole, slice(3, 3 + rows))
        assert (np.array(whole)[:, 3 : 3 + rows] == np.array(y)).all()
        assert not np.array(whole)[:, :3].any()
        assert not np.array(whole)[:, 3 + rows :].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "layouts", "slices"), [("qwen2", "", True), ("gemma3", "mixed", False)]
)
def test_gradients_are_those_without_compiled_code(
    tiny: Tiny, rng: Rng, tmp_path: Path, family: str, layouts: str, slices: bool, dtype: str
) -> None:
    if dtype == "bfloat16":
        require_onednn()
    bundle = tiny(family, layouts)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)

    def gradients(compiled: bool) -> dict[str, mx.array]:
        (folder := tmp_path / str(compiled)).mkdir()
        model = model_of(bundle, 32, slices=slices, compute_dtype=dtype, compiled=compiled)
        return mebp(model, adapters, rows, folder)[1]

    ours, others = gradients(True), gradients(False)
    for name, value in others.items():
        if value.any():
            assert reference.relative_error(ours[name], value) <= CLOSE, name
