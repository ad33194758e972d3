"""Tensors in a scratch file: values, order, refusals, and that they are not on the heap."""

from __future__ import annotations

import io
import sys
import tracemalloc
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.bundles import Rng
from support.files import listing

from runtime.machine.footprint import read_footprint
from runtime.run.folder import RunFolder
from runtime.storage.activations import Activations
from runtime.storage.scratch import MappedTensors, map_scratch

DTYPES = (mx.float32, mx.bfloat16, mx.float32)


def shapes_of(rng: Rng) -> dict[str, tuple[int, ...]]:
    return {
        f"t{i}": tuple(int(n) for n in rng.integers(1, 40, int(rng.integers(1, 4))))
        for i in range(12)
    }


def filled(tensors: MappedTensors, rng: Rng, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        tensors[name] = mx.array(rng.standard_normal(shape).astype(np.float32))


def test_what_is_set_is_read_and_a_copy_stays_as_it_was(tmp_path: Path, rng: Rng) -> None:
    shapes = shapes_of(rng)
    tensors = MappedTensors(tmp_path, "tensors", shapes)
    assert listing(tmp_path) == []  # the file has no name
    assert list(tensors) == list(shapes) and len(tensors) == len(shapes)
    assert all(not tensors[name].any() for name in shapes)
    expected = {}
    for name in rng.permutation(list(shapes)):
        expected[name] = rng.standard_normal(shapes[name]).astype(np.float32)
        tensors[name] = mx.array(expected[name])
    before = tensors["t3"]
    assert {name: value.shape for name, value in tensors.items()} == shapes
    assert all(np.array_equal(np.array(tensors[name]), expected[name]) for name in shapes)
    tensors["t3"] = before + 1
    assert np.array_equal(np.array(before), expected["t3"])


def test_files_hold_the_tensors_in_order(tmp_path: Path, rng: Rng) -> None:
    shapes = shapes_of(rng)
    one, other = (MappedTensors(tmp_path, "tensors", shapes) for _ in range(2))
    filled(one, rng, shapes)
    file = io.BytesIO()
    one.write(file)
    assert file.getvalue() == b"".join(np.array(one[name]).tobytes() for name in shapes)
    assert len(file.getvalue()) == one.nbytes
    file.seek(0)
    other.read(file)
    assert all(mx.array_equal(one[name], other[name]) for name in shapes)


def test_names_and_shapes_are_fixed(tmp_path: Path) -> None:
    tensors = MappedTensors(tmp_path, "tensors", {"a": (2, 3)})
    with pytest.raises(ValueError, match=r"a: \(3, 2\) .* not \(2, 3\)"):
        tensors["a"] = mx.zeros((3, 2))
    with pytest.raises(ValueError, match="bfloat16"):
        tensors["a"] = mx.zeros((2, 3), mx.bfloat16)
    with pytest.raises(KeyError):
        tensors["b"] = mx.zeros((2, 3))
    with pytest.raises(TypeError, match="fixed"):
        del tensors["a"]


def test_checkpoints_are_what_was_stored_last_and_few_bytes_of_memory(tmp_path: Path) -> None:
    """Of any shape and type, however many places there are."""
    slots, rows = 3, 50
    tracemalloc.start()
    scratch = Activations(tmp_path, slots, rows, (1, 4, 6))
    with pytest.raises(KeyError, match="nothing is stored in slot 1 of row 7"):
        scratch.get(1, 7)
    for number, (slot, row) in enumerate(places := [*product(range(slots), range(rows))]):
        scratch.put(slot, row, mx.full((1, 4, 5 + number % 2), number, DTYPES[number % 3]))
    del number, slot, row
    taken = tracemalloc.get_traced_memory()[0] - sys.getsizeof(places) - 64 * len(places)
    tracemalloc.stop()
    assert taken < 16 * slots * rows + 5000
    scratch.put(0, 0, mx.full((1, 4, 6), 7.0))
    for number, (slot, row) in enumerate(places[1:], start=1):
        value = mx.full((1, 4, 5 + number % 2), number, DTYPES[number % 3])
        stored = scratch.get(slot, row)
        assert stored.dtype == value.dtype and mx.array_equal(stored, value)
    assert mx.array_equal(scratch.get(0, 0), mx.full((1, 4, 6), 7.0))


def test_tensors_are_no_part_of_the_footprint(tmp_path: Path, rng: Rng) -> None:
    """Nor of the resident size: pages that were touched are unmapped, also of a file in memory."""
    shapes = {f"t{i}": (1 << 18,) for i in range(64)}  # 64 MB
    filled(MappedTensors(tmp_path, "warm", {"a": (1 << 18,)}), rng, {"a": (1 << 18,)})
    before = read_footprint()
    tensors = MappedTensors(tmp_path, "tensors", shapes)
    filled(tensors, rng, shapes)
    assert sum(value.size for value in tensors.values()) == 1 << 24
    after = read_footprint()
    assert tensors.nbytes == 1 << 26
    assert after.footprint_bytes - before.footprint_bytes < 16_000_000
    if sys.platform == "linux":
        assert after.rss_bytes - before.rss_bytes < 16_000_000


def test_a_kill_before_the_file_has_lost_its_name_does_not_take_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.created(), monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        map_scratch(folder.path, "adapters", 100).close()
    assert len(listing(folder.path)) == 3  # with the lock and the saves
    with folder.created():
        assert len(listing(folder.path)) == 2
