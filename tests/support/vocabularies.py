"""A small SentencePiece vocabulary, as the metadata of a GGUF file has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens in GGUF files
PIECES = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "aa", "cab", "▁b"]


def spm_metadata(scores: Sequence[float] | np.ndarray, prefix: bool = False) -> dict[str, Any]:
    """Special tokens, tokens of the user, one for each byte, and PIECES with these scores."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    octets = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces = [(piece, NORMAL) for piece in PIECES]
    tokens, types = zip(*special, ("   ", USER), ("\n", USER), *octets, *pieces, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(
            [-1000.0] * (len(tokens) - len(PIECES)) + [*scores], "f4"
        ),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.add_bos_token": True,
    }
