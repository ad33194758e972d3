"""Token files read back, damaged ones refused, where a split is found, and the order of rows."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_rows import VOCAB, after, listed, write_rows

from runtime.core.errors import DataError, UsageError
from runtime.data import token_rows as data
from runtime.data.report import DataReport
from runtime.data.source import prepare_tokens, split_file
from runtime.data.token_rows import RandomRows, TokenRows, order


def test_the_training_process_does_not_load_the_tokenizer() -> None:
    loaded = "'tokenizers' in sys.modules, 'mlx' in sys.modules"
    code = f"import sys, runtime.data.token_rows; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_where_a_split_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    (tmp_path / "valid.jsonl").touch()
    assert split_file(tmp_path, "train") == tmp_path / "train.txt"
    assert split_file(tmp_path, "valid") == tmp_path / "valid.jsonl"
    assert split_file(tmp_path, "test") is None
    assert split_file(tmp_path / "train.txt", "valid") == tmp_path / "train.txt"
    with pytest.raises(DataError, match=r"has no test file; it has 'train\.txt', 'valid"):
        prepare_tokens(tmp_path, tmp_path, "test", 4, tmp_path / "out")
    with pytest.raises(DataError, match="no data at"):
        split_file(tmp_path / "none", "train")
    (tmp_path / "dev.csv").touch()
    assert split_file(tmp_path, "valid") == tmp_path / "valid.jsonl"
    (tmp_path / "valid.jsonl").unlink()
    for name in ("dev.csv", "val.csv", "validation.csv"):
        found = split_file(tmp_path, "valid")
        assert found is not None and found.name == name
        found.rename(tmp_path / {"dev.csv": "val.csv"}.get(name, "validation.csv"))
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"has train\.jsonl and train\.txt"):
        split_file(tmp_path, "train")


def test_a_pipe_is_refused_since_data_are_read_more_than_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for place in (tmp_path / "pipe.jsonl", Path("/dev/null")):
        with pytest.raises(DataError, match="is no file or folder but a pipe or a device"):
            split_file(place, "train")


def test_the_bytes_of_a_token_file(tmp_path: Path) -> None:
    out = write_rows(tmp_path / "out", [([5, 6, 7], [1]), ([8, 9], [0])])
    report = msgspec.json.encode(DataReport(source="test", read=2, kept=2))
    assert out.read_bytes() == (
        b"ondvtok\0" + struct.pack("<IIQQQ", 2, 8, 2, 5, len(report))
        + struct.pack("<qI", 0, 3) + struct.pack("<qI", 3, 2)
        + struct.pack("<5i", 5, 6, 7, 8, 9) + bytes([0, 0, 1, 0, 1]) + report
    )  # fmt: skip


def test_lengths_are_those_of_the_rows(tmp_path: Path) -> None:
    rows = TokenRows(write_rows(tmp_path / "out", [([5, 6, 7], [1]), ([8, 9], [0])]), VOCAB)
    assert rows.lengths.tolist() == [2, 1]
    assert RandomRows(3, VOCAB, 4, 5).lengths.tolist() == [4] * 5


def put(at: int, kind: str, value: int) -> Callable[[bytes], bytes]:
    packed = struct.pack(kind, value)
    return lambda raw: raw[:at] + packed + raw[at + len(packed) :]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda raw: b"", "less than a header"),
        (lambda raw: b"X" + raw[1:], "not a token file"),
        (put(8, "<I", 1), "version is 1"),
        (put(16, "<Q", 0), "no rows"),
        (put(16, "<Q", 2**60), "not"),
        (lambda raw: raw[:-1], "bytes, not"),
        (put(89, "<b", 0), "its report is wrong"),
        (put(89, "<b", -1), "its report is wrong"),
        (lambda raw: raw + b"\0", "bytes, not"),
        (put(40, "<q", -1), "do not join"),
        (put(52, "<q", 2), "do not join"),
        (put(48, "<I", 1), "too short"),
        (put(48, "<I", 10), "too long"),
        (put(60, "<I", 3), "rows end after 5"),
        (put(64, "<i", -1), "token -1 is outside"),
        (put(80, "<i", 101), "token 101 is outside the vocabulary of 101"),
        (put(86, "<b", 0), "has no loss"),
        (put(86, "<b", 2), "neither scored nor not"),
        (put(84, "<b", 1), "nothing predicts the first token"),
        (put(87, "<b", 1), "nothing predicts the first token"),
    ],
)
def test_damaged_token_files_are_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], complaint: str
) -> None:
    out = write_rows(tmp_path / "out", [([5, 6, 7], [1]), ([8, 9], [0])])
    assert listed(TokenRows(out, 101)) == [([5, 6, 7], [1]), ([8, 9], [0])]
    out.write_bytes(damage(out.read_bytes()))
    with pytest.raises(DataError, match=complaint):
        TokenRows(out, 101)


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open one would wait for its writer
    with pytest.raises(DataError, match=r"cannot read token file .* is a pipe"):
        TokenRows(tmp_path / "pipe", VOCAB)
    with pytest.raises(DataError, match="cannot read token file"):
        TokenRows(tmp_path / "none", 101)
    rows = TokenRows(write_rows(tmp_path / "out", [([5, 6], [0])]), 101)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            rows.row(index)
        with pytest.raises(IndexError):
            RandomRows(0, 10, 4, 1).row(index)


@settings(max_examples=30)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    out = write_rows(tmp_path_factory.mktemp("fuzz") / "out", [([5, 6, 7], [1]), ([8, 9], [0])])
    raw = out.read_bytes()
    out.write_bytes(raw[:at] + noise + raw[at + len(noise) :])
    try:
        rows = TokenRows(out, VOCAB)
    except DataError:
        return
    for tokens, scored in listed(rows):
        assert scored and min(scored) >= 0 and max(scored) <= len(tokens) - 2
        assert all(0 <= token < 101 for token in tokens)


def test_many_rows_are_checked_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_CHECK_ITEMS", 7)
    made = [
        after([number % 50] * (2 + number % 5), number % (1 + number % 5)) for number in range(100)
    ]
    assert listed(TokenRows(write_rows(tmp_path / "out", made), 50)) == made
    with pytest.raises(DataError, match="token 49"):
        TokenRows(tmp_path / "out", 49)


def test_random_rows_depend_on_seed_and_index_alone() -> None:
    rows = RandomRows(3, 1000, 6, 50)
    assert len(rows) == 50
    assert listed(RandomRows(3, 1000, 6, 10)) == listed(rows)[:10]
    assert listed(rows) != listed(RandomRows(4, 1000, 6, 50))


def plain_hash(*keys: int) -> int:
    """SplitMix64's finalizer over each key in turn, in plain integers."""
    state = 0
    for key in keys:
        state = ((state ^ key) + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state


def test_the_hash_is_splitmix64() -> None:
    # the first outputs of the published generator from state 0
    assert plain_hash(0) == 0xE220A8397B1DCDAF
    assert plain_hash(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 2**31 - 1))
def test_rows_and_orders_follow_the_plain_hash(seed: int, index: int, vocab_size: int) -> None:
    tokens, scored = RandomRows(seed, vocab_size, 4, 2**41).row(index)
    assert tokens.tolist() == [plain_hash(1, seed, index, place) % vocab_size for place in range(5)]
    assert scored.tolist() == [0, 1, 2, 3]
    wanted = sorted(range(9), key=lambda row: plain_hash(2, seed, index, row))
    assert order(seed, index, 9).tolist() == wanted


def test_random_seeds_are_read_from_the_flag() -> None:
    assert data.random_seed("random:0") == 0
    assert data.random_seed("random.txt") is None
    for wrong in ("random:", "random:-1", "random:x", "random:²"):
        with pytest.raises(UsageError, match="random:0"):
            data.random_seed(wrong)
