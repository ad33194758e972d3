"""Rows of data in every format, tokenized as training would read them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, ClassVar

from support.chat_encoders import CALLED, CLOCK, said
from support.mutations import Rng, mutate
from support.token_rows import VOCAB, make_bundle

from fuzz.forked_module import forked_modules
from fuzz.kind import Change, Kind, Read, damage, put_in_place, sha256
from runtime.core.errors import DataError
from runtime.data.source import Reading, prepare_tokens
from runtime.data.token_rows import TokenRows

LENGTH = 256
TEMPLATE = (Path(__file__).parents[2] / "support/chat_templates/chatml.jinja").read_text()
TOKENIZER = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
ROWS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": said("sun in X?", "yes", "rain?", "no")}, {"messages": CALLED}],
    "tools": [
        {"messages": CALLED, "tools": [CLOCK]},
        {"messages": said("x?", "yes"), "tools": [CLOCK]},
    ],
    "prompts": [{"prompt": "the sun", "completion": " is there"}],
    "alpaca": [{"instruction": "say it", "input": "the sun", "output": "sun"}],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]}
    ],
    "text": [{"text": "the sun is there\nthe rain is not"}],
}  # fmt: skip
TABLE = [
    {"prompt": "the sun", "completion": "is, there"},
    {"prompt": 'the "rain"', "completion": "no"},
]
PLAIN = "the sun is there\n\nand the rain, the rain is not\n" * 20


def tokenized(bundle: Path, data: Path, output: Path, reading: Reading, length: int) -> str:
    """Facts of the token file that a training would have made of the data.

    Raises:
        OnDeviceError: the data, the tokenizer or the template are refused.
    """
    with forked_modules():
        prepare_tokens(bundle, data, "train", length, output, reading)
    return sha256(output)


def _line(text: bytes) -> Change:
    """A row as a JSON line in place of whatever the file held."""
    return _instead("data.jsonl", text + b"\n")


def _table(text: bytes) -> Change:
    return _instead("data.csv", text)


def _instead(name: str, data: bytes) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        (path,) = folder.iterdir()
        path.unlink()
        (folder / name).write_bytes(data)

    return changed


class Data(Kind):
    """Files of text, JSON lines, JSON, CSV and Parquet."""

    name = "data"
    originals = (*ROWS, "list", "table", "plain", "columns")
    known: ClassVar[dict[str, Change]] = {
        "nested beyond recursion": _line(b"[" * 100_000),
        "messages nested beyond recursion": _line(
            b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"
        ),
        "messages in text nested beyond recursion": _line(
            json.dumps({"messages": "[" * 100_000}).encode()
        ),
        "number 1e999": _line(b'{"text": 1e999}'),
        "number of 5000 digits": _line(b'{"text": ' + b"9" * 5000 + b"}"),
        "not UTF-8": _line(b'{"text": "\xff\xfe"}'),
        "half a surrogate pair": _line(b'{"text": "\\ud800"}'),
        "half a pair in a message": _line(
            b'{"messages": [{"role": "user", "content": "\\ud800"}, '
            b'{"role": "assistant", "content": "\\udc00"}]}'
        ),
        "speaker is a list": _line(b'{"conversations": [{"from": [], "value": "x"}]}'),
        "null bytes": _table(b"prompt,completion\n\0\0,\0\n"),
        "unclosed quote": _table(b'prompt,completion\n"the sun,no\n' + b"x" * 200_000),
        "no header": _table(b"\n\n\n"),
        "a cell of 3 MB": _table(b"text\n" + b"the " * 750_000),
    }

    def prepare(self, folder: Path) -> None:
        make_bundle(folder / "bundle", {**TOKENIZER, "chat_template": TEMPLATE})
        for name, rows in ROWS.items():
            lines = [json.dumps(row) for row in rows * 3]
            _place(folder, name, "data.jsonl").write_text("\n".join(lines) + "\n")
        _place(folder, "list", "data.json").write_text(json.dumps(ROWS["prompts"] * 3))
        _place(folder, "plain", "data.txt").write_text(PLAIN)
        with _place(folder, "table", "data.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(TABLE[0]))
            writer.writeheader()
            writer.writerows(TABLE)
        _write_parquet(_place(folder, "columns", "data.parquet"))

    def change(self, folder: Path, rng: Rng) -> object:
        (path,) = folder.iterdir()
        if rng.random() < 0.02:
            return put_in_place(path, rng)
        if path.suffix in (".jsonl", ".json") and rng.random() < 0.7:
            rows = [json.loads(line) for line in path.read_bytes().splitlines()]
            done = mutate(rows, rng)
            path.write_text("\n".join(map(json.dumps, rows)) + "\n")
            return done
        return damage(path, rng)

    def read(self, folder: Path, original: Path) -> Read:
        (path,) = folder.iterdir()
        found = []
        for skip in (False, True):
            output = Path(f"{skip}.tokens").absolute()
            reading = Reading(skip_bad_rows=skip)
            try:
                found.append(tokenized(original.parent / "bundle", path, output, reading, LENGTH))
                TokenRows(output, VOCAB)  # which a training must be able to read
            except DataError:
                if skip:
                    raise
                found.append("refused")
        return Read(0, found)


def _place(folder: Path, name: str, file: str) -> Path:
    (folder / name).mkdir()
    return folder / name / file


def _write_parquet(path: Path) -> None:
    """A Parquet file where pyarrow is installed, and else one that only names it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.with_suffix(".jsonl").write_text(json.dumps(TABLE[0]) + "\n")
        return
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), path)
