"""Checksums of a folder's files: a kill at any instant leaves files that agree with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import BundleError
from runtime.core.files import write_atomic
from runtime.storage.checksums import Checksums

OLD, NEW, OTHER = b"old", b"new", b"other"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class KilledError(Exception):
    """Stands for a kill: what comes after it is not done."""


def agrees(folder: Path, data: bytes) -> bool:
    """Whether a file with this content would agree with its checksum."""
    (folder / "file").write_bytes(data)
    try:
        Checksums(folder).check("file", "the way out")
    except BundleError as problem:
        assert "the way out" in str(problem)
        return False
    return True


def replaced(folder: Path, data: bytes, kill: str = "") -> None:
    """Replace the file, unless a kill comes before or after that."""
    with Checksums(folder).replacing("file", sha256(data)):
        if kill != "before":
            write_atomic(folder / "file", data)
        if kill:
            raise KilledError


def test_only_the_content_that_was_written_agrees(tmp_path: Path) -> None:
    for data in (OLD, NEW):
        replaced(tmp_path, data)
        assert (tmp_path / "file").read_bytes() == data
        assert [agrees(tmp_path, one) for one in (OLD, NEW, OTHER)] == [data == OLD, data == NEW, 0]


@pytest.mark.parametrize("kill", ["before", "after"])
def test_after_a_kill_the_old_content_and_the_new_agree(tmp_path: Path, kill: str) -> None:
    replaced(tmp_path, OLD)
    with pytest.raises(KilledError):
        replaced(tmp_path, NEW, kill)
    assert (tmp_path / "file").read_bytes() == (OLD if kill == "before" else NEW)
    assert [agrees(tmp_path, one) for one in (OLD, NEW, OTHER)] == [True, True, False]
    with pytest.raises(KilledError):
        replaced(tmp_path, OTHER, kill)  # whichever of the two the file holds
    assert all(agrees(tmp_path, one) for one in (OLD, NEW, OTHER))
    replaced(tmp_path, OTHER)
    assert [agrees(tmp_path, one) for one in (OLD, NEW, OTHER)] == [False, False, True]


def test_files_are_told_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    contents = {name: rng.bytes(9) for name in ("a", "b")}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        Checksums(tmp_path).record(name)
    for name in contents:
        Checksums(tmp_path).check(name, "")
    (tmp_path / "a").write_bytes(contents["b"])
    with pytest.raises(BundleError, match="a is altered"):
        Checksums(tmp_path).check("a", "")
    (tmp_path / "c").write_bytes(contents["b"])
    with pytest.raises(BundleError, match="c has no checksum"):
        Checksums(tmp_path).check("c", "")
    (tmp_path / "a").unlink()
    with pytest.raises(BundleError, match="a is not there"):
        Checksums(tmp_path).check("a", "")
    (tmp_path / "a").mkdir()
    with pytest.raises(BundleError, match="it is a folder, not a file"):
        Checksums(tmp_path).check("a", "")
