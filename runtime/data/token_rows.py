"""Rows of tokens to train on: read from a mapped token file, or drawn from a seed.

Text becomes tokens in another process (`runtime.data.tokenizing`), so the tokenizer's memory
is never part of the training footprint; it writes a token file, from which training
copies one row at a time. The order of rows is a function of (seed, epoch).

Token file, all little-endian: the header (magic `ondvtok\\0`, version and seq_length as uint32,
then rows, tokens and bytes of the report as uint64), one index entry per row (start as int64,
length as uint32; rows follow one another), the tokens as int32, and a byte per token, which is 1 if
the token is scored, that is, if its prediction has a loss. The first token of a row never is. A
`DataReport` in JSON follows.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from runtime.core.errors import DataError, UsageError
from runtime.core.files import require_file
from runtime.core.typed import decoded
from runtime.data.report import DataReport

MAGIC = b"ondvtok\0"
VERSION = 2
HEADER = struct.Struct("<8sIIQQQ")  # magic, version, seq_length, rows, tokens, report_bytes
INDEX = np.dtype([("start", "<i8"), ("length", "<u4")])
TOKENS = np.dtype("<i4")
RANDOM_ROWS = 1 << 16  # how many rows `random:SEED` stands for
MOST_DIGITS = 20  # of the seed of random rows, of which 64 bits count
_CHECK_ITEMS = 2**16  # how much of a token file is checked at a time

Tokens = npt.NDArray[np.int32]
Positions = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int64]
"""How many tokens each row predicts, (n,)."""


class Rows(Protocol):
    """Something with numbered rows; the report is that of their file, if there is one."""

    @property
    def report(self) -> DataReport | None: ...

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> Lengths:
        """How many tokens each row predicts, as a new array."""

    def row(self, index: int) -> tuple[Tokens, Positions]:
        """Row `index`: its tokens (T + 1,), and the positions (N,) that are scored.

        The inputs are `tokens[:-1]`, the targets `tokens[1:]`; the targets at the positions, which
        increase, have a loss.
        """


def random_seed(data: str) -> int | None:
    """The seed in `random:SEED`; None if `data` names a path. Raises UsageError."""
    if not data.startswith("random:"):
        return None
    digits = data.removeprefix("random:")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS):
        raise UsageError(
            f"{data!r:.80} has no seed of up to {MOST_DIGITS} digits; write for example random:0"
        )
    return int(digits)


class _Head(NamedTuple):
    """The header of a token file, and the size of the file."""

    seq_length: int
    rows: int
    tokens: int
    report_bytes: int
    size_bytes: int


def _read_head(path: Path) -> _Head:
    """The header of a token file. Raises DataError if it is none, or of another version."""
    try:
        require_file(path)
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            size_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}") from error
    _require(path, len(head) == HEADER.size, f"{size_bytes} bytes are less than a header")
    magic, version, seq_length, rows, tokens, report_bytes = HEADER.unpack(head)
    _require(path, magic == MAGIC, "it is not a token file")
    _require(path, version == VERSION, f"its version is {version}, not {VERSION}")
    _require(path, rows > 0, "it has no rows")
    return _Head(seq_length, rows, tokens, report_bytes, size_bytes)


def _require(path: Path, good: bool, complaint: str) -> None:
    if not good:
        raise DataError(
            f"token file {path} is damaged or foreign: {complaint}; delete it and it is made anew "
            "from the data"
        )


def count_rows(path: Path) -> int:
    """How many rows a token file holds, without a look at them. Raises DataError."""
    return _read_head(path).rows


class TokenRows:
    """The rows of a token file, mapped; `vocab_size` is the model's number of tokens.

    Everything is checked once, in pieces, before a row is read. Raises DataError.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        head = _read_head(path)
        self.seq_length, rows, tokens = head.seq_length, head.rows, head.tokens
        report_bytes, size_bytes = head.report_bytes, head.size_bytes
        tokens_at = HEADER.size + rows * INDEX.itemsize
        scored_at = tokens_at + tokens * TOKENS.itemsize
        report_at = scored_at + tokens
        wanted_bytes = report_at + report_bytes
        self._require(size_bytes == wanted_bytes, f"it has {size_bytes} bytes, not {wanted_bytes}")
        self._require(tokens >= 2 * rows, f"{tokens} tokens are too few for {rows} rows")
        view = np.memmap(path, mode="r")
        self._index = view[HEADER.size : tokens_at].view(INDEX)
        self._tokens = view[tokens_at:scored_at].view(TOKENS)
        self._scored = view[scored_at:report_at]
        self._check_index()
        self._check_tokens(vocab_size)
        try:
            self.report = decoded(view[report_at:].tobytes(), DataReport)
        except ValueError as error:
            self._require(False, f"its report is wrong: {error}")

    def __len__(self) -> int:
        return len(self._index)

    @property
    def lengths(self) -> Lengths:
        return self._index["length"].astype(np.int64) - 1

    def row(self, index: int) -> tuple[Tokens, Positions]:
        """Row `index`, see Rows. Raises IndexError if there is no such row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, length = self._index[index].item()
        tokens = np.array(self._tokens[start : start + length], dtype=np.int32)
        return tokens, np.flatnonzero(self._scored[start + 1 : start + length])

    def _check_index(self) -> None:
        end = 0
        for at in range(0, len(self._index), _CHECK_ITEMS):
            part = self._index[at : at + _CHECK_ITEMS]
            length = part["length"].astype(np.int64)
            ends = end + np.cumsum(length)
            starts = ends - length
            fits = (length >= 2) & (length <= self.seq_length + 1)
            self._require(bool(fits.all()), "a row is too short or too long")
            self._require(bool((part["start"] == starts).all()), "its rows do not join")
            last = int(ends[-1])
            self._require(last <= len(self._tokens), f"its rows end after {len(self._tokens)}")
            self._check_scored(end, last, starts)
            end = last
        self._require(end == len(self._tokens), f"its rows end at {end} of {len(self._tokens)}")

    def _check_scored(self, start: int, stop: int, row_starts: npt.NDArray[np.int64]) -> None:
        """Check the bytes start:stop, in which rows begin at `row_starts`."""
        most = np.maximum.reduceat(self._scored[start:stop], row_starts - start)
        self._require(bool((most >= 1).all()), "a row has no loss")
        self._require(bool((most <= 1).all()), "a token is neither scored nor not")
        first = self._scored[row_starts]
        self._require(not first.any(), "nothing predicts the first token of a row")

    def _check_tokens(self, vocab_size: int) -> None:
        for at in range(0, len(self._tokens), _CHECK_ITEMS):
            part = self._tokens[at : at + _CHECK_ITEMS]
            low, high = int(part.min()), int(part.max())
            if low < 0 or high >= vocab_size:
                wrong = low if low < 0 else high
                self._require(False, f"token {wrong} is outside the vocabulary of {vocab_size}")

    def _require(self, good: bool, complaint: str) -> None:
        _require(self._path, good, complaint)


class RandomRows:
    """`count` rows of `seq_length` + 1 random tokens; row i depends on (seed, i) alone."""

    def __init__(self, seed: int, vocab_size: int, seq_length: int, count: int) -> None:
        self.seq_length, self.report = seq_length, None
        self._seed, self._vocab_size, self._count = seed, vocab_size, count

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> Lengths:
        return np.full(self._count, self.seq_length)

    def row(self, index: int) -> tuple[Tokens, Positions]:
        """Row `index`, of which every position is scored. Raises IndexError if there is none."""
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of {self._count}")
        words = _hashed(1, self._seed, index, np.arange(self.seq_length + 1, dtype=np.uint64))
        return (words % np.uint64(self._vocab_size)).astype(np.int32), np.arange(self.seq_length)


def order(seed: int, epoch: int, n: int) -> npt.NDArray[np.int32]:
    """The (n,) order of rows 0..n-1 in `epoch`: their order by a hash of (seed, epoch, row)."""
    keys = _hashed(2, seed, epoch, np.arange(n, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int32)


def _hashed(*keys: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Keys folded into 64 bits by SplitMix64's finalizer, one result per element of the last.

    Not numpy.random: its module costs megabytes, and it does not promise the same stream in
    every version.
    """
    state = np.zeros(1, dtype=np.uint64)
    for key in keys:
        word = np.uint64(key & (2**64 - 1)) if isinstance(key, int) else key
        state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state
