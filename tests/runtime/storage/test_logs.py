"""Logs: the checksum of what they hold, and what a run that goes on keeps of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from runtime.core.errors import BundleError, StorageError
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
