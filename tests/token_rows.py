"""Rows of tokens for tests: written to a token file, and listed."""

from __future__ import annotations

from pathlib import Path

from runtime.data import Rows
from runtime.tokenize_file import write_token_file

VOCAB = 101


def listed(rows: Rows) -> list[tuple[list[int], int]]:
    return [(tokens.tolist(), start) for tokens, start in map(rows.row, range(len(rows)))]


def write_rows(out: Path, rows: list[tuple[list[int], int]], length: int = 8) -> Path:
    write_token_file(rows, length, out)
    return out
