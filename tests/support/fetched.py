"""Tokenizers that people have, which `make tokenizers` fetches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FETCHED = Path(sys.prefix) / "share" / "tokenizers"


def fetched(name: str) -> Path:
    """The folder of a tokenizer; without it the test is skipped."""
    if not (FETCHED / name / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {name} was not fetched (make tokenizers, which needs npm)")
    return FETCHED / name
