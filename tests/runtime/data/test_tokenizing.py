"""Text into token files: chunks, rows, special tokens, and what is refused with its place."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_rows import (
    BOS,
    EOS,
    VOCAB,
    after,
    ids,
    listed,
    make_bundle,
    make_tokenizer,
    read,
    tokenize,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.core.errors import DataError, StorageError
from runtime.data import tokenizing as tokenize_file
from runtime.data.source import READ_ALL, Reading, prepare_tokens
from runtime.data.text_encoder import load_encoder
from runtime.data.token_rows import TokenRows
from runtime.data.tokenizer_files import FLAGS, STANDARD


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose tokenizer adds BOS."""
    config = {"add_bos_token": True, "bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}
    return make_bundle(tmp_path / "bundle", config)


def test_text_is_tokenized_in_another_process(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.txt").write_text("the cat\nsat on the mat\n")
    out = prepare_tokens(bundle, folder, "train", 4, tmp_path / "new" / "train.tokens")
    rows = TokenRows(out, VOCAB)
    wanted = ids("the cat\nsat on the mat\n")
    chunks = [wanted[at : at + 4] for at in range(0, len(wanted), 4)]
    assert listed(rows) == [after([BOS, *chunk]) for chunk in chunks]
    assert (rows.seq_length, rows.report.kept) == (4, len(chunks))
    assert rows.row(0)[0].dtype == np.int32
    assert [path.name for path in out.parent.iterdir()] == ["train.tokens"]


@pytest.mark.parametrize("name", ["rows.txt", "rows.jsonl", "rows.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_how_much_is_read_is_told_while_it_takes_long(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    rows = [json.dumps({"text": f"the cat {number}"}) for number in range(5)]
    text = f"[{','.join(rows)}]" if name.endswith("n") else "".join(f"{row}\n" for row in rows)
    (tmp_path / name).write_text(text)
    told: list[tuple[int, int]] = []
    reader = tokenize_file.Reader(
        tmp_path / name, load_encoder(bundle), 4, Reading(valid_share=share),
        tell=lambda *counts: told.append(counts),
    )  # fmt: skip
    assert list(reader.rows()) and not told
    monkeypatch.setattr(tokenize_file, "TELL_S", 0.0)
    assert list(reader.rows())
    assert told[-5:] == [(done, 5) for done in range(5)]


@given(st.lists(st.lists(st.integers(2, 99), max_size=30)), st.integers(1, 9), st.booleans())
def test_each_token_is_a_target_once(parts: list[list[int]], length: int, with_bos: bool) -> None:
    tokens = [token for part in parts for token in part]
    rows = list(tokenize_file.packed_rows(parts, BOS if with_bos else None, length))
    targets = [
        token for row in rows for token, one in zip(row.tokens, row.scored, strict=True) if one
    ]
    rows = [row.tokens for row in rows]
    assert targets == (tokens if with_bos else tokens[1:])
    assert all(len(row) == length + 1 for row in rows[:-1])
    assert all(2 <= len(row) <= length + 1 for row in rows)
    if with_bos:
        assert all(row[0] == BOS for row in rows)
    else:
        assert all(a[-1] == b[0] for a, b in pairwise(rows))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["the", "cat ", "\n", "\n\n", " a", "  ", "1!", "!\n"])))
def test_chunks_give_the_tokens_of_the_whole(words: list[str]) -> None:
    text = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenize_file, "CHUNK_CHARS", 4)
        chunks = list(tokenize_file.text_chunks(text.splitlines(keepends=True), ids))
    assert "".join(chunks) == text
    assert [token for chunk in chunks for token in ids(chunk)] == ids(text)


def test_chunks_are_bounded_where_no_break_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_file, "CHUNK_CHARS", 10)
    monkeypatch.setattr(tokenize_file, "MAX_CHUNK_CHARS", 40)

    def marking(text: str) -> list[int]:
        return [0, *text.encode()]

    chunks = list(tokenize_file.text_chunks(["a line\n"] * 100, marking))
    assert "".join(chunks) == "a line\n" * 100
    assert {len(chunk) for chunk in chunks[:-1]} == {42}
    safe = list(tokenize_file.text_chunks(["a line\n"] * 100, lambda text: list(text.encode())))
    assert max(map(len, safe)) == 14


def test_a_long_corpus_goes_through_in_pieces(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_file, "CHUNK_CHARS", 64)
    text = "".join(f"line {number} of the text\n" + "\n" * (number % 3) for number in range(500))
    (tmp_path / "long.txt").write_text("\ufeff" + text, encoding="utf-8")
    rows = tokenize(bundle, tmp_path / "long.txt", 16, tmp_path / "out")
    assert [token for tokens, _ in listed(rows) for token in tokens[1:]] == ids(text)


def test_a_completion_is_tokenized_where_it_stands(bundle: Path) -> None:
    """As the continuation of its prompt, whose own tokens stay; a prefixed space comes once."""
    tokenizer = make_tokenizer()
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.save(str(bundle / "tokenizer" / "tokenizer.json"))
    across, apart = {"prompt": "t", "completion": "he"}, {"prompt": "cat ", "completion": "sat"}
    rows = listed(read(bundle, across, apart, length=20))
    assert rows[0] == after([BOS, *ids(" t"), *ids(" he"), EOS], 2)  # not the one token of "the"
    assert rows[1] == after([BOS, *ids(" cat sat"), EOS], 5)


def test_a_file_that_may_not_be_read_is_named(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.txt"
    data.write_text("the\n")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read any
    with pytest.raises(DataError, match=r"cannot read .*data.txt: permission denied"):
        tokenize_file.tokenize(bundle, data, 8, tmp_path / "out", READ_ALL, "train", None)


@pytest.mark.parametrize(
    ("config", "template", "bos", "eos"),
    [
        ({"add_bos_token": False, "bos_token": "<bos>", "eos_token": "<eos>"}, True, None, EOS),
        ({"bos_token": "<bos>"}, True, BOS, None),
        ({"bos_token": "<bos>", "add_bos_token": None}, True, BOS, None),
        ({"bos_token": "<bos>"}, False, None, None),
        ({"add_bos_token": True, "bos_token": None}, True, None, None),
        ({}, False, None, None),
    ],
)
def test_which_special_tokens_are_added(
    tmp_path: Path, config: object, template: bool, bos: int | None, eos: int | None
) -> None:
    folder = make_bundle(tmp_path / "bundle", config)
    if template:
        tokenizer = make_tokenizer()
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", BOS)])
        tokenizer.enable_truncation(3)
        tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    encoder = load_encoder(folder)
    assert (encoder.bos, encoder.eos) == (bos, eos)
    assert encoder.encode("abcdef") == ids("abcdef")


def test_characters_without_tokens_are_named(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", {})
    (tmp_path / "a.txt").write_text("the \u65e5 cat\u2028\t\n" * 3 + "\u0416")
    rows = tokenize(bundle, tmp_path / "a.txt", 4, tmp_path / "out")
    assert rows.report is not None
    assert rows.report.warning_lines() == ["a.txt: the tokenizer has no token for 'Ж', '日'"]
    spaced = Tokenizer(models.BPE({"\u2581": 0, "a": 1, "\u2581a": 2}, [("\u2581", "a")]))
    spaced.pre_tokenizer, spaced.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    spaced.save(str(bundle / "tokenizer" / "tokenizer.json"))
    encoder = load_encoder(bundle)
    assert encoder.encode("a\u65e5") == [2] and encoder.unknown_in("a \u65e5") == ["\u65e5"]


MODELS = {
    "words": models.WordLevel({"the": 0, "cat": 1, "[UNK]": 2, "a": 3, "t": 4}, unk_token="[UNK]"),
    "pieces": models.WordPiece(
        {"the": 0, "c": 1, "##a": 2, "##t": 3, "[UNK]": 4, "e": 5}, unk_token="[UNK]"
    ),
    "letters": models.BPE({letter: n for n, letter in enumerate("thecat\u00e9 ")}, []),
}


@pytest.mark.parametrize(
    ("kind", "normalizer", "text", "unknown"),
    [
        ("words", None, "the<eos>cat", []),
        ("words", None, "the cat  the", []),  # of which no letter has a token
        ("words", None, "the tact the Cat", ["Cat", "tact"]),
        ("pieces", None, "cat the", []),  # t stands in words alone
        ("pieces", None, "cat cut t", ["cut", "t"]),
        ("pieces", normalizers.BertNormalizer(), "TH\u00c9 the\u0301 \u200d", []),
        ("letters", None, "cat the\u0301", ["\u0301"]),
        ("letters", normalizers.NFC(), "cat the\u0301", []),
        ("letters", normalizers.NFC(), "ca\u0301t", ["\u00e1"]),
        ("letters", normalizers.NFKC(), "\uff43\uff41t", []),
        ("letters", normalizers.Replace("x", ""), "caxt", ["x"]),  # which the model never sees
    ],
)
def test_what_a_tokenizer_knows_is_not_named(
    tmp_path: Path, kind: str, normalizer: normalizers.Normalizer, text: str, unknown: list[str]
) -> None:
    bundle = make_bundle(tmp_path / "bundle", {})
    tokenizer = Tokenizer(MODELS[kind])
    tokenizer.add_special_tokens(["<eos>"])
    if kind != "letters":
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.save(str(bundle / "tokenizer" / "tokenizer.json"))
    assert load_encoder(bundle).unknown_in(text) == unknown


def test_without_a_bos_rows_overlap_by_one_token(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", {})
    (tmp_path / "a.txt").write_text("abcdefg")
    rows = tokenize(folder, tmp_path / "a.txt", 3, tmp_path / "out")
    assert listed(rows) == [after(ids("abcd")), after(ids("defg"))]
    rows = read(folder, {"prompt": "", "completion": "ab"}, {"text": "a"}, length=3)
    assert listed(rows) == [after(ids("ab"))]
    assert rows.report.dropped == {"it is empty": 1}


def test_rows_with_tokens_that_the_model_does_not_embed_are_left_out(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", {"extra_special_tokens": ["<new>"]})
    (tmp_path / "a.txt").write_text("abcdefg<new>hijk")
    rows = tokenize(folder, tmp_path / "a.txt", 4, tmp_path / "out")
    assert listed(rows) == [after(ids("abcde")), after(ids("hijk"))]
    assert rows.report.dropped == {"the model does not embed all of its tokens": 1}
    assert [line[:28] for line in rows.report.lost] == ["the token '<new>' (number 10"]
    said = "no row is left: rows with a token that the model does not embed are left out"
    with pytest.raises(DataError, match=said):
        read(folder, {"text": "<new>a"}, length=4)
    cut = read(folder, {"text": "abcdefg<new>"}, length=4)  # what is cut away costs nothing
    assert listed(cut) == [after(ids("abcde"))]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "no tokens to train on: it is empty"),
        ("a.txt", b"ok\n\xff\xfe", "not text in UTF-8"),
        ("a.jsonl", b"", "it is empty"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": \n', r"line 3: Expecting value: column 10 \("),
        ("a.jsonl", b'{"text": "fine"}\n{"text": true}', "line 2: expected"),
        ("a.jsonl", b'{"prompt": "fine"}', "line 1: expected"),
        ("a.jsonl", b'{"text": "fine"}\n{"messages": []}', "no chat template"),
        ("a.jsonl", b"[1]", "line 1: expected"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: .*; it is half of an emoji"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1: "),
        ("a.jsonl", b"[" * 100_000, "line 1: "),
        ("a.jsonl", b'{"prompt": "much too long", "completion": "x"}', "every row is too long"),
        ("a.json", b"{", "holds no JSON list of rows: "),
        (
            "a.json",
            b'{"a": 1, "b": 2}',
            "no JSON list of rows, but an object with .a., .b.; write one row",
        ),
        ("a.json", b'[{"mapping": {}, "title": "t"}]', "a chat as ChatGPT or Claude exports it"),
        ("a.json", b'[{"chat_messages": []}]', "row 1: it is a chat as ChatGPT or Claude exports"),
        ("a.csv", b"prompt,completion\na", "line 2: it has not as many cells as the header"),
        ("a.csv", b"prompt,completion\na,b,c", "line 2: it has not as many cells as the header"),
        ("a.csv", b'prompt,completion\n"a', "line 1: unexpected end of data"),
        ("a.csv", b"prompt,completion\n\xff,b", "is not text in UTF-8"),
        ("a.csv", b"", "it is empty"),
        ("a.csv", b"Question,Answer\na,b", r"line 2: expected .*; it has 'Question', 'Answer'"),
        ("a.doc", b"a,b", r"not a .txt, .jsonl, .json, .csv, .tsv or .parquet file"),
    ],
)
def test_bad_data_is_refused_with_its_place(
    bundle: Path, tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "tokens" / "out"
    with pytest.raises(DataError, match=complaint):
        tokenize(bundle, tmp_path / name, 4, out)
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_failures_of_the_process_are_errors_here(bundle: Path, tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text('{"text": "ok"}\n{"text"')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: ") as caught:
        prepare_tokens(bundle, source, "train", 4, tmp_path / "out")
    assert "Traceback" not in str(caught.value)
    (tmp_path / "good.txt").write_text("the cat")
    with pytest.raises(StorageError, match="cannot write"):
        prepare_tokens(bundle, tmp_path / "good.txt", "train", 4, source / "out")
    (bundle / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="random:SEED"):
        prepare_tokens(bundle, tmp_path / "good.txt", "train", 4, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "cannot be read: .*surrogates"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "cannot be read"),
        ("added_tokens.json", '{"<x>": "one"}', "'<x>' in added_tokens.json: 'one' is no number"),
        ("added_tokens.json", '{"<x>": Infinity}', "cannot be read"),
    ],
)
def test_a_broken_tokenizer_is_refused(
    bundle: Path, name: str, content: str, complaint: str
) -> None:
    (bundle / "tokenizer" / name).write_text(content)
    with pytest.raises(DataError, match=complaint):
        load_encoder(bundle)


@pytest.mark.parametrize("wrong", [["x"], {"x": 1}, -1, 0.5, True])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("tokenizer_config.json", key) for key in (*STANDARD, "added_tokens_decoder")),
        ("tokenizer_config.json", "extra_special_tokens"),
        ("tokenizer_config.json", "additional_special_tokens"),
        *(("tokenizer_config.json", key) for key in ("add_bos_token", "split_special_tokens")),
        ("special_tokens_map.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
    ],
)
def test_a_wrong_value_about_tokens_is_named(
    bundle: Path, name: str, key: str, wrong: object
) -> None:
    extra = key.endswith("special_tokens")
    if (wrong is True and key == "add_bos_token") or (extra and type(wrong) in (list, dict)):
        return  # which may be so
    if (wrong, key) == (-1, "eos_token_id"):  # no end, as an export says
        return
    (bundle / "tokenizer" / name).write_text(json.dumps({key: wrong}))
    with pytest.raises(DataError, match=f"cannot be read: .*{key}"):
        load_encoder(bundle)


@pytest.mark.parametrize("flag", [*FLAGS, "special"])
@pytest.mark.parametrize("wrong", ["x", 1, None, []])
def test_a_flag_of_a_token_is_true_or_false(bundle: Path, flag: str, wrong: object) -> None:
    token = {"content": "<eos>", flag: wrong}
    for config, at in (
        ({"added_tokens_decoder": {"1": token}}, "added_tokens_decoder.1"),
        ({"eos_token": token}, "eos_token"),
    ):
        (bundle / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(DataError, match=rf"{at}\.{flag} must be true or false"):
            load_encoder(bundle)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dropout": 0.5}, "dropout = 0.5 .* draws other tokens each time; set it to null"),
        ({"continuing_subword_prefix": "<longer>"}, "cannot be read"),  # a panic of the library
    ],
)
def test_tokens_that_are_drawn_or_cannot_be_read_are_refused(
    bundle: Path, change: dict[str, object], complaint: str
) -> None:
    file = bundle / "tokenizer" / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["model"] |= change
    file.write_text(json.dumps(whole))
    with pytest.raises(DataError, match=complaint):
        load_encoder(bundle)
