"""Tokenizers from elsewhere: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from support.mutations import Rng, mutate, pick
from support.token_rows import make_bundle

from fuzz.kind import Change, Kind, Read, damage, put_in_place, write
from fuzz.kinds.data import LENGTH, ROWS, TEMPLATE, TOKENIZER, tokenized
from runtime.data.source import Reading

DATA = "data.jsonl"


def _write(name: str, data: bytes) -> Change:
    return write(f"tokenizer/{name}", data)


class Tokenizers(Kind):
    """The files of a tokenizer folder."""

    name = "tokenizers"
    known: ClassVar[dict[str, Change]] = {
        "nested beyond recursion": _write("tokenizer.json", b"[" * 100_000),
        "configuration nested beyond recursion": _write("tokenizer_config.json", b"[" * 100_000),
        "generation nested beyond recursion": _write("generation_config.json", b"[" * 100_000),
        "generation is a list": _write("generation_config.json", b"[]"),
        "ends of everything": _write("generation_config.json", b'{"eos_token_id": [[1], {}]}'),
        "end 1e999": _write("generation_config.json", b'{"eos_token_id": 1e999}'),
        "not UTF-8": _write("tokenizer.json", b"\xff\xfe{}"),
        "end is half a character": _write("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
        "special tokens are a number": _write("special_tokens_map.json", b"7"),
    }

    def prepare(self, folder: Path) -> None:
        make_bundle(folder / "original", {**TOKENIZER, "chat_template": TEMPLATE})
        (folder / "original/tokenizer/generation_config.json").write_text('{"eos_token_id": [1]}')
        (folder / "original/tokenizer/special_tokens_map.json").write_text('{"bos_token": "<bos>"}')
        rows = [row for rows in ROWS.values() for row in rows]
        (folder / "original" / DATA).write_text("\n".join(map(json.dumps, rows)) + "\n")

    def change(self, folder: Path, rng: Rng) -> object:
        path = pick(rng, sorted((folder / "tokenizer").iterdir()))
        if rng.random() < 0.03:
            return put_in_place(path, rng)
        if rng.random() < 0.3:
            done = damage(path, rng)
        else:
            document = json.loads(path.read_bytes())
            aside = document.pop("model", None) if rng.random() < 0.7 else None
            done = mutate(document, rng)
            if aside is not None:
                document["model"] = aside
            path.write_text(json.dumps(document))
        return f"{path.name}: {done}"

    def read(self, folder: Path, original: Path) -> Read:
        output = Path("out.tokens").absolute()
        reading = Reading(skip_bad_rows=True)
        return Read(0, tokenized(folder, folder / DATA, output, reading, LENGTH))
