"""Rows of tokens for tests: a small tokenizer, and rows written to a token file and listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from runtime.data.loss_mask import Row
from runtime.data.report import DataReport
from runtime.data.source import READ_ALL, Reading
from runtime.data.text_encoder import load_encoder
from runtime.data.token_rows import Rows, TokenRows
from runtime.data.tokenizing import Reader, write_token_file

VOCAB = 101
BOS, EOS = 0, 1
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
WORDS = r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s*[\r\n]+|\s+"


Listed = tuple[list[int], list[int]]  # tokens, and the scored positions


def after(tokens: list[int], first: int = 0) -> Listed:
    """A row whose positions are scored from `first` on."""
    return tokens, list(range(first, len(tokens) - 1))


def listed(rows: Rows) -> list[Listed]:
    found = map(rows.row, range(len(rows)))
    return [(tokens.tolist(), scored.tolist()) for tokens, scored in found]


def row_texts(rows: TokenRows) -> list[tuple[str, str]]:
    """Each row as text, and what of it is scored."""
    tokenizer = make_tokenizer()

    def text(tokens: Any) -> str:
        return "".join(str(tokenizer.id_to_token(int(token))) for token in tokens)

    pairs = map(rows.row, range(len(rows)))
    return [(text(tokens), text(tokens[1:][scored])) for tokens, scored in pairs]


def write_rows(out: Path, rows: list[Listed], length: int = 8) -> Path:
    made = [Row(ids, bytes(at - 1 in scored for at in range(len(ids)))) for ids, scored in rows]
    write_token_file(made, length, out, DataReport(source="test", read=len(rows), kept=len(rows)))
    return out


def make_tokenizer() -> Tokenizer:
    """Single characters, but words in 'the' and runs of newlines merged, split as by GPT-2."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    pieces = ["<bos>", "<eos>", *characters, "th", "the", "\n\n"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("\n", "\n")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()  # else a space comes between tokens
    return tokenizer


def write_tokenizer(folder: Path, config: object) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_bundle(folder: Path, config: object) -> Path:
    """As much of a bundle as reading text takes: its tokenizer."""
    (folder / "tokenizer").mkdir(parents=True)
    write_tokenizer(folder / "tokenizer", config)
    return folder


def chat_bundle(folder: Path, template: object) -> Path:
    """The same, with the usual special tokens and a chat template."""
    return make_bundle(folder / "bundle", {**SPECIAL, "chat_template": template})


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def tokenize(
    bundle: Path,
    source: Path,
    length: int,
    out: Path,
    reading: Reading = READ_ALL,
    part: str = "train",
    embedded: int = VOCAB,
) -> TokenRows:
    """As `prepare_tokens`, in this process."""
    reader = Reader(source, load_encoder(bundle), length, reading, part, embedded)
    write_token_file(reader.rows(), length, out, reader.report)
    return TokenRows(out, VOCAB)


def read(bundle: Path, *rows: Any, reading: Reading = READ_ALL, length: int = 400) -> TokenRows:
    """Rows that lie one a line in rows.jsonl beside the bundle."""
    source = bundle.parent / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    return tokenize(bundle, source, length, bundle.parent / "out", reading)
