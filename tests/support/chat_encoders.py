"""Conversations for tests, tokenizers with a chat template, and what of a row is scored."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from runtime.data.loss_mask import Row
from runtime.data.text_encoder import TextEncoder, load_encoder
from support.token_rows import SPECIAL, make_tokenizer


def said(*texts: str) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


SYSTEM = {"role": "system", "content": "be short"}
TWO = said("sun in X?", "yes", "rain in X?", "no")
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "CET"}}}
CALLED = [
    *said("what time?"),
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "clock", "content": "12"},
    {"role": "assistant", "content": "noon"},
]


def chat_encoder(folder: Path, template: str, special: Iterable[str]) -> TextEncoder:
    """The small tokenizer with a chat template and the special tokens that it writes."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(list(special))
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    text = json.dumps({**SPECIAL, "chat_template": template})
    (folder / "tokenizer" / "tokenizer_config.json").write_text(text)
    return load_encoder(folder)


def scored_texts(encoder: TextEncoder, row: Row) -> list[str]:
    """The text of each run of scored tokens."""
    runs = groupby(zip(row.tokens, row.scored, strict=True), lambda each: each[1])
    return [encoder.show([token for token, _ in run]) for scored, run in runs if scored]
