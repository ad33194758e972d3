"""Tokenizing into token files, reading them back, refusing damaged ones, and the order of rows."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from ondevice.errors import DataError, StorageError, UsageError
from runtime import data, tokenize_file
from runtime.data import RandomRows, TokenRows, order, prepare_tokens, row_index

BOS, EOS, VOCAB = 0, 1, 101
WORDS = r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s*[\r\n]+|\s+"


def make_tokenizer() -> Tokenizer:
    """Single characters, but words in 'the' and runs of newlines merged, split as by GPT-2."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    pieces = ["<bos>", "<eos>", *characters, "th", "the", "\n\n"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("\n", "\n")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return tokenizer


def make_bundle(folder: Path, config: object) -> Path:
    (folder / "tokenizer").mkdir(parents=True)
    make_tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose tokenizer adds BOS."""
    config = {"add_bos_token": True, "bos_token": {"content": "<bos>"}, "eos_token": "<eos>"}
    return make_bundle(tmp_path / "bundle", config)


def ids(text: str) -> list[int]:
    return list(make_tokenizer().encode(text).ids)


def tokenize(bundle: Path, source: Path, length: int, out: Path) -> TokenRows:
    """As `prepare_tokens`, in this process."""
    encoder = tokenize_file.load_encoder(bundle)
    rows = tokenize_file.read_rows(source, encoder, length)
    tokenize_file.write_token_file(rows, length, out)
    return TokenRows(out, VOCAB)


def listed(rows: data.Rows) -> list[tuple[list[int], int]]:
    return [(tokens.tolist(), start) for tokens, start in map(rows.row, range(len(rows)))]


def write_rows(out: Path, rows: list[tuple[list[int], int]], length: int = 8) -> Path:
    tokenize_file.write_token_file(rows, length, out)
    return out


def test_text_is_tokenized_in_another_process(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.txt").write_text("the cat\nsat on the mat\n")
    out = prepare_tokens(bundle, folder, "train", 4, tmp_path / "new" / "train.tokens")
    rows = TokenRows(out, VOCAB)
    wanted = ids("the cat\nsat on the mat\n")
    chunks = [wanted[at : at + 4] for at in range(0, len(wanted), 4)]
    assert listed(rows) == [([BOS, *chunk], 0) for chunk in chunks]
    assert (rows.seq_length, rows.dropped) == (4, 0)
    assert rows.row(0)[0].dtype == np.int32
    assert [path.name for path in out.parent.iterdir()] == ["train.tokens"]


def test_the_training_process_does_not_load_the_tokenizer() -> None:
    code = "import sys, runtime.data; print('tokenizers' in sys.modules, 'mlx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(2, 99), max_size=30)), st.integers(1, 9), st.booleans())
def test_each_token_is_a_target_once(parts: list[list[int]], length: int, with_bos: bool) -> None:
    tokens = [token for part in parts for token in part]
    rows = list(tokenize_file.packed_rows(parts, BOS if with_bos else None, length))
    targets = [token for row, start in rows for token in row[1 + start :]]
    assert targets == (tokens if with_bos else tokens[1:])
    assert all(len(row) == length + 1 for row, _ in rows[:-1])
    assert all(2 <= len(row) <= length + 1 for row, _ in rows)
    if with_bos:
        assert all(row[0] == BOS for row, _ in rows)
    else:
        assert all(a[-1] == b[0] for (a, _), (b, _) in pairwise(rows))


@settings(max_examples=60, deadline=None)
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


def test_lines_of_json_become_rows(bundle: Path, tmp_path: Path) -> None:
    lines = [
        {"text": "the cat"},
        {"prompt": "ab:", "completion": " the"},
        {"prompt": "far too long a prompt", "completion": "x"},
        {"text": "a text that is cut"},
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n\n".join(map(json.dumps, lines)))
    rows = tokenize(bundle, source, 8, tmp_path / "out")
    assert listed(rows) == [
        ([BOS, *ids("the cat"), EOS], 0),
        ([BOS, *ids("ab:"), *ids(" the"), EOS], 3),
        ([BOS, *ids("a text that is cut")[:8]], 0),
    ]
    assert rows.dropped == 1
    # the first target with a loss is the first token of the completion
    tokens, start = rows.row(1)
    assert tokens[1:][start:].tolist() == [*ids(" the"), EOS]


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
    encoder = tokenize_file.load_encoder(folder)
    assert (encoder.bos, encoder.eos) == (bos, eos)
    assert encoder.encode("abcdef") == ids("abcdef")


def test_without_a_bos_rows_overlap_by_one_token(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "bundle", {})
    (tmp_path / "a.txt").write_text("abcdefg")
    rows = tokenize(folder, tmp_path / "a.txt", 3, tmp_path / "out")
    assert listed(rows) == [(ids("abcd"), 0), (ids("defg"), 0)]
    (tmp_path / "a.jsonl").write_text('{"prompt": "", "completion": "ab"}\n{"text": "a"}')
    rows = tokenize(folder, tmp_path / "a.jsonl", 3, tmp_path / "out")
    assert listed(rows) == [(ids("ab"), 0)]
    assert rows.dropped == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "no tokens to train on: it is empty"),
        ("a.txt", b"ok\n\xff\xfe", "not text in UTF-8"),
        ("a.jsonl", b"", "it is empty"),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": ', "line 3: "),
        ("a.jsonl", b'{"text": "fine"}\n{"text": 5}', "line 2: expected"),
        ("a.jsonl", b'{"prompt": "fine"}', "line 1: expected"),
        ("a.jsonl", b"[1]", "line 1: expected"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: "),
        ("a.jsonl", b'{"text": "\xff"}', "line 1: "),
        ("a.jsonl", b"[" * 100_000, "line 1: "),
        ("a.jsonl", b'{"prompt": "much too long", "completion": "x"}', "all 1 rows are too long"),
        ("a.csv", b"a,b", "neither .txt nor .jsonl"),
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
    with pytest.raises(DataError, match="use --data random:SEED"):
        prepare_tokens(bundle, tmp_path / "good.txt", "train", 4, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"bos_token": "<s>"}', "lacks its bos_token '<s>'"),
    ],
)
def test_a_broken_tokenizer_is_refused(
    bundle: Path, name: str, content: str, complaint: str
) -> None:
    (bundle / "tokenizer" / name).write_text(content)
    with pytest.raises(DataError, match=complaint):
        tokenize_file.load_encoder(bundle)


def test_where_a_split_is_found(tmp_path: Path) -> None:
    (tmp_path / "train.txt").touch()
    (tmp_path / "valid.jsonl").touch()
    assert data.split_file(tmp_path, "train") == tmp_path / "train.txt"
    assert data.split_file(tmp_path, "valid") == tmp_path / "valid.jsonl"
    assert data.split_file(tmp_path, "test") is None
    assert data.split_file(tmp_path / "train.txt", "valid") == tmp_path / "train.txt"
    with pytest.raises(DataError, match=r"neither test\.txt nor test\.jsonl"):
        prepare_tokens(tmp_path, tmp_path, "test", 4, tmp_path / "out")
    with pytest.raises(DataError, match="no data at"):
        data.split_file(tmp_path / "none", "train")
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match="has both"):
        data.split_file(tmp_path, "train")


def test_the_bytes_of_a_token_file(tmp_path: Path) -> None:
    out = write_rows(tmp_path / "out", [([5, 6, 7], 1), ([8, 9], 0)])
    assert out.read_bytes() == (
        b"ondvtok\0" + struct.pack("<IIQQQ", 1, 8, 0, 2, 5)
        + struct.pack("<qII", 0, 3, 1) + struct.pack("<qII", 3, 2, 0)
        + struct.pack("<5i", 5, 6, 7, 8, 9)
    )  # fmt: skip


def put(at: int, kind: str, value: int) -> Callable[[bytes], bytes]:
    packed = struct.pack(kind, value)
    return lambda raw: raw[:at] + packed + raw[at + len(packed) :]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda raw: b"", "less than a header"),
        (lambda raw: b"X" + raw[1:], "not a token file"),
        (put(8, "<I", 2), "version is 2"),
        (put(24, "<Q", 0), "no rows"),
        (put(24, "<Q", 2**60), "not"),
        (lambda raw: raw[:-1], "91 bytes, not 92"),
        (lambda raw: raw + b"\0", "93 bytes, not 92"),
        (put(40, "<q", -1), "do not join"),
        (put(56, "<q", 2), "do not join"),
        (put(48, "<I", 1), "too short"),
        (put(48, "<I", 10), "too long"),
        (put(52, "<I", 2), "has no loss"),
        (put(64, "<I", 3), "rows end at 6 of 5"),
        (put(72, "<i", -1), "token -1 is outside"),
        (put(88, "<i", 101), "token 101 is outside the vocabulary of 101"),
    ],
)
def test_damaged_token_files_are_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], complaint: str
) -> None:
    out = write_rows(tmp_path / "out", [([5, 6, 7], 1), ([8, 9], 0)])
    assert listed(TokenRows(out, 101)) == [([5, 6, 7], 1), ([8, 9], 0)]
    out.write_bytes(damage(out.read_bytes()))
    with pytest.raises(DataError, match=complaint):
        TokenRows(out, 101)


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read token file"):
        TokenRows(tmp_path / "none", 101)
    rows = TokenRows(write_rows(tmp_path / "out", [([5, 6], 0)]), 101)
    for index in (-1, 1):
        with pytest.raises(IndexError):
            rows.row(index)
        with pytest.raises(IndexError):
            RandomRows(0, 10, 4, 1).row(index)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200))
def test_no_bytes_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    out = write_rows(tmp_path_factory.mktemp("fuzz") / "out", [([5, 6, 7], 1), ([8, 9], 0)])
    raw = out.read_bytes()
    out.write_bytes(raw[:at] + noise + raw[at + len(noise) :])
    try:
        rows = TokenRows(out, VOCAB)
    except DataError:
        return
    for tokens, start in listed(rows):
        assert 0 <= start <= len(tokens) - 2
        assert all(0 <= token < 101 for token in tokens)


def test_many_rows_are_checked_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_CHECK_ITEMS", 7)
    made = [([number % 50] * (2 + number % 5), 0) for number in range(100)]
    assert listed(TokenRows(write_rows(tmp_path / "out", made), 50)) == made
    with pytest.raises(DataError, match="token 49"):
        TokenRows(tmp_path / "out", 49)


def test_random_rows_depend_on_seed_and_index_alone() -> None:
    rows = RandomRows(3, 1000, 6, 50)
    assert len(rows) == 50
    assert listed(RandomRows(3, 1000, 6, 10)) == listed(rows)[:10]
    assert listed(rows) != listed(RandomRows(4, 1000, 6, 50))
    drawn = np.array([tokens for tokens, _ in listed(RandomRows(0, 16, 63, 200))])
    assert drawn.shape == (200, 64)
    counts = np.bincount(drawn.ravel(), minlength=16)
    assert counts.size == 16
    assert abs(counts - 800).max() < 150  # five standard deviations of a uniform draw


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


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 2**31 - 1))
def test_rows_and_orders_follow_the_plain_hash(seed: int, index: int, vocab_size: int) -> None:
    tokens, start = RandomRows(seed, vocab_size, 4, 2**41).row(index)
    assert tokens.tolist() == [plain_hash(1, seed, index, place) % vocab_size for place in range(5)]
    assert start == 0
    wanted = sorted(range(9), key=lambda row: plain_hash(2, seed, index, row))
    assert order(seed, index, 9).tolist() == wanted


def test_random_seeds_are_read_from_the_flag() -> None:
    assert data.random_seed("random:0") == 0
    assert data.random_seed("random.txt") is None
    for wrong in ("random:", "random:-1", "random:x", "random:²"):
        with pytest.raises(UsageError, match="random:0"):
            data.random_seed(wrong)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(1, 300))
def test_an_order_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    assert sorted(order(seed, epoch, n).tolist()) == list(range(n))


def test_orders_differ_by_seed_and_epoch_and_are_fair() -> None:
    orders = [tuple(order(seed, epoch, 20).tolist()) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    first = np.bincount([order(0, epoch, 4)[0] for epoch in range(2000)], minlength=4)
    assert abs(first - 500).max() < 100


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.lists(st.integers(0, 200), min_size=1))
def test_the_row_of_a_position_needs_no_history(seed: int, n: int, positions: list[int]) -> None:
    unbroken = [int(row) for epoch in range(200 // n + 1) for row in order(seed, epoch, n)]
    assert [row_index(seed, position, n) for position in positions] == [
        unbroken[position] for position in positions
    ]


def test_there_is_no_row_before_the_first_or_of_nothing() -> None:
    for position, n in ((-1, 5), (0, 0)):
        with pytest.raises(ValueError):
            row_index(0, position, n)
