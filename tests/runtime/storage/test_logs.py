"""Logs and the checksums of a folder: what they hold after a kill at any instant."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import BundleError, StorageError
from runtime.core.files import write_atomic
from runtime.storage.checksums import Checksums
from runtime.storage.logs import Log, Prefix


def of_file(path: Path) -> Prefix:
    """The slow way: over the file as it is."""
    data = path.read_bytes()
    return Prefix(len(data), hashlib.sha256(data).hexdigest())


def lines(rng: np.random.Generator, count: int) -> list[str]:
    return ["é" * int(size) + "\n" for size in rng.integers(0, 9, count)]


def test_the_checksum_is_that_of_the_file(tmp_path: Path, rng: np.random.Generator) -> None:
    log = Log(tmp_path / "log")
    log.start(b"header\n")
    for line in lines(rng, 20):
        log.append(line)
        assert log.sync() == log.prefix == of_file(log.path)
    log.close()


def test_what_was_not_saved_is_dropped(tmp_path: Path, rng: np.random.Generator) -> None:
    first, saved, lost, later = lines(rng, 4)
    log = Log(tmp_path / "log")
    log.start()
    for line in (first, saved):
        log.append(line)
    kept = log.sync()
    log.append(lost)
    log.close()
    again = Log(log.path)
    again.check(kept, "")
    assert log.path.read_text() == first + saved + lost  # until it goes on
    again.go_on()
    again.append(later)
    again.close()
    assert log.path.read_text() == first + saved + later
    assert again.prefix == of_file(log.path)


def test_another_beginning_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    log = Log(tmp_path / "log")
    log.start(rng.bytes(50))
    kept = log.sync()
    log.close()
    whole = bytearray(log.path.read_bytes())
    whole[int(rng.integers(50))] ^= 1
    for altered in (bytes(whole), bytes(whole[:-1]), b""):
        log.path.write_bytes(altered)
        with pytest.raises(BundleError, match=r"log is altered: .* of its first 50 bytes .*; so"):
            Log(log.path).check(kept, "so")
        assert log.path.read_bytes() == altered


@pytest.mark.parametrize("how", ["removed", "replaced", "cut"])
def test_a_log_that_is_no_longer_the_one_written_cannot_be_saved(tmp_path: Path, how: str) -> None:
    log = Log(tmp_path / "log")
    log.start(b"header\n")
    log.append("line\n")
    data = log.path.read_bytes()
    if how == "cut":
        log.path.write_bytes(data[:-1])
    else:
        log.path.unlink()
    if how == "replaced":
        log.path.write_bytes(data)
    with pytest.raises(StorageError, match="log"):
        log.sync()
    assert log.path.exists() == (how != "removed")
    log.close()


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
