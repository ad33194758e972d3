"""Formats of data: which files and fields are read as what, and what is said of them."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
from support.token_rows import (
    BOS,
    EOS,
    SPECIAL,
    VOCAB,
    after,
    chat_bundle,
    ids,
    listed,
    make_bundle,
    read,
    row_texts,
    tokenize,
)

from runtime.config.shared import DATA_SUFFIXES
from runtime.core.errors import DataError
from runtime.data.records import READERS, TEXT, encoding_of, records, suffix_of
from runtime.data.source import Reading, prepare_tokens, split_file
from runtime.data.token_rows import TokenRows

CHAT = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}<eos>{% endfor %}{{ 'a: ' if "
CHAT += "add_generation_prompt else '' }}"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return chat_bundle(tmp_path, CHAT)


TOLD = ("s: s<eos>u: a?<eos>a: yes<eos>", "yes<eos>")
COMPLETED = ("<bos>a? b<eos>", " b<eos>")
CHATTED = ("u: a?<eos>a: yes<eos>", "yes<eos>")
ASKED = [{"role": "user", "content": "a?"}]
ANSWER = [{"role": "assistant", "content": "yes"}]
SHARED = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "yes"}]
ALPACA = {"instruction": "a?", "input": "", "output": "yes"}


@pytest.mark.parametrize(
    ("row", "name", "expected"),
    [
        ({"messages": ASKED + ANSWER}, "messages", CHATTED),
        ({"messages": json.dumps(ASKED + ANSWER)}, "messages", CHATTED),
        ({"conversations": ASKED + ANSWER}, "ShareGPT", CHATTED),
        ({"conversations": SHARED}, "ShareGPT", CHATTED),
        ({"system": "s", "conversations": SHARED}, "ShareGPT", TOLD),
        ({"prompt": ASKED, "completion": ANSWER}, "prompt and completion, as messages", CHATTED),
        ({"prompt": "a?", "completion": " b"}, "prompt and completion", COMPLETED),
        ({"text": "abc"}, "text", ("<bos>abc<eos>", "abc<eos>")),
        (ALPACA, "Alpaca, as conversations", CHATTED),
        (
            {**ALPACA, "input": "b"}, "Alpaca, as conversations",
            ("u: a?\n\nb<eos>a: yes<eos>", "yes<eos>"),
        ),
    ],
)  # fmt: skip
def test_fields_are_recognised_and_named(
    bundle: Path, row: object, name: str, expected: tuple[str, str]
) -> None:
    rows = read(bundle, row)
    assert row_texts(rows) == [expected]
    assert rows.report.formats == {name: 1}


def test_alpaca_has_its_own_prompt_where_there_is_no_template(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "plain", SPECIAL)
    rows = read(bundle, {**ALPACA, "input": "b"}, ALPACA)
    (first, scored), (second, _) = row_texts(rows)
    assert first.endswith("### Instruction:\na?\n\n### Input:\nb\n\n### Response:\nyes<eos>")
    assert scored == "yes<eos>"
    assert "### Input" not in second and "further context" in first
    assert rows.report.formats == {"Alpaca, in Alpaca's prompt": 2}


def test_columns_name_other_fields(bundle: Path) -> None:
    reading = Reading(columns={"prompt": "q", "completion": "a"})
    rows = read(bundle, {"q": "a?", "a": " b", "text": "not this"}, reading=reading)
    assert row_texts(rows) == [COMPLETED]
    with pytest.raises(DataError, match=r"line 1: it has no field 'q', which --columns names; it"):
        read(bundle, {"question": "a?"}, reading=reading)


def test_a_column_that_is_named_is_no_mark_of_answers(bundle: Path) -> None:
    reading = Reading(columns={"prompt": "sentence", "completion": "label"})
    labelled = ({"sentence": "a", "label": bit} for bit in (0, 1, "false"))
    rows = read(bundle, *labelled, reading=reading)
    assert [scored for _, scored in row_texts(rows)] == ["0<eos>", "1<eos>", "false<eos>"]
    assert (rows.report.dropped, rows.report.lost) == ({}, {})


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"conversations": "x"}, "conversations is not a list of messages"),
        (
            {"conversations": [{"from": "dog", "value": "x"}]},
            "message 1 has the role 'dog', .*kno",
        ),
        ({"conversations": [{"from": [], "value": "x"}]}, "message 1 has no role"),
        ({"conversations": [{"from": "human"}]}, "message 1 has no content"),
        ({"instruction": "x"}, "expected .*Alpaca's .*ShareGPT's .*--columns"),
        ({"prompt": ASKED, "completion": "x"}, r"expected .*it has 'prompt' \(a list\), 'complet"),
        (
            {"translation": {"en": "x"}, "good": True},
            r"expected .*'translation' \(an object\), 'go",
        ),
        ({"messages": str(ASKED + ANSWER)}, "its list is text that is no"),
        ({"messages": ASKED + ANSWER, "tools": "none"}, "its tools are text that is no JSON: 'no"),
        (
            {"messages": ASKED + ANSWER, "tools": '[{"a": 1, "a": 2}]'},
            "its tools are JSON text in which it has the key 'a' twice",
        ),
    ],
)
def test_fields_that_fit_nothing_are_refused(bundle: Path, row: object, complaint: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: {complaint}"):
        read(bundle, row)


ROWS = [{"prompt": "a?", "completion": " b\nc"}, {"prompt": "\u00e9", "completion": "d"}]


def write(file: Path, rows: list[dict[str, str]]) -> None:
    if file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="", encoding="utf-8-sig") as opened:
            writer = csv.DictWriter(
                opened, rows[0], delimiter="," if file.suffix == ".csv" else "\t"
            )
            writer.writeheader()
            writer.writerows(rows)
    elif file.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


@pytest.mark.parametrize("suffix", READERS)
def test_every_file_of_records_gives_the_same(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    write(file, ROWS)
    places, found = zip(*records(file), strict=True)
    assert list(found) == ROWS
    assert all(place.split()[0] in ("line", "row") for place in places)


def test_every_suffix_that_is_named_is_read() -> None:
    assert set(DATA_SUFFIXES) == {TEXT, *READERS}


LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
PRETTY = "\n".join(json.dumps(row, indent=1) for row in ROWS)
TABLE = "prompt,completion\na?,yes\n"
SPACED = TABLE.replace(",", ", ", 1)


@pytest.mark.parametrize(
    ("name", "content", "how", "expected"),
    [
        ("UPPER.JSONL", LINES.encode(), [], ROWS),
        ("bom.jsonl", LINES.encode("utf-8-sig"), [], ROWS),
        ("utf16.jsonl", LINES.encode("utf-16"), ["in UTF-16"], ROWS),
        ("utf16.json", json.dumps(ROWS).encode("utf-16-le"), ["in UTF-16"], ROWS),
        ("big_endian.jsonl", LINES.encode("utf-16-be"), ["in UTF-16"], ROWS),
        ("utf32.jsonl", LINES.encode("utf-32"), ["in UTF-32"], ROWS),
        ("array.jsonl", json.dumps(ROWS).encode(), ["in a JSON array"], ROWS),
        ("array.jsonl", json.dumps(ROWS, indent=1).encode(), ["in a JSON array"], ROWS),
        ("pretty.jsonl", PRETTY.encode(), ["over several lines each"], ROWS),
        ("pretty.json", PRETTY.encode(), ["over several lines each"], ROWS),
        ("lines.json", LINES.encode(), ["one a line"], ROWS),
        ("u2028.jsonl", b'{"text": "a\xe2\x80\xa8b"}\n', [], [{"text": "a\u2028b"}]),
        ("utf16.csv", TABLE.encode("utf-16"), ["in UTF-16"], None),
        ("a.csv", TABLE.replace(",", ";").encode(), ["separated by semicolons"], None),
        ("a.csv", b"sep=;\n" + TABLE.replace(",", ";").encode(), ["separated by semicolons"], None),
        ("a.csv", TABLE.replace(",", "\t").encode(), ["separated by tabs"], None),
        ("a.TSV", TABLE.replace(",", "\t").encode(), [], None),
        ("a.csv", SPACED.encode(), ["with spaces in the header left out"], None),
        ("one.csv", b"text\na;b\n", [], [{"text": "a;b"}]),
    ],
)  # fmt: skip
def test_a_file_is_read_as_what_it_holds_and_that_is_said(
    tmp_path: Path, name: str, content: bytes, how: list[str], expected: list[Any] | None
) -> None:
    (tmp_path / name).write_bytes(content)
    said: list[str] = []
    rows = [row for _, row in records(tmp_path / name, said.append)]
    assert rows == (expected or [{"prompt": "a?", "completion": "yes"}])
    assert said == how


def test_what_is_unusual_about_a_file_is_counted_with_its_format(bundle: Path) -> None:
    file = bundle.parent / "rows.jsonl"
    file.write_bytes(json.dumps([{"text": "ab"}, {"text": "cd"}]).encode("utf-16"))
    rows = tokenize(bundle, file, 8, bundle.parent / "out")
    assert rows.report.formats == {"text, in UTF-16, in a JSON array": 2}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'[{"text": "a"},\n{"text"', "holds a JSON array that is broken: .*line 2"),
        (
            "a.json",
            b'{"a": 1, "b": [2]}',
            r"holds no .*, but an object with 'a', 'b' \(a list\); wr",
        ),
        ("a.json", b'{"messages": [{"role": "user"}]}', "holds no JSON list of rows"),
        ("a.csv", b"text\n\xe9\xe9\n", "is not text in UTF-8"),
        ("a.jsonl", "[".encode("utf-16") + b"1", "is not text in UTF-16"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), r"is compressed \(gzip\); unpack it"),
        ("a.csv", b"PK\x03\x04\x14\x00", r"is compressed \(zip, as .xlsx is too\)"),
        ("a.parquet", gzip.compress(b"", mtime=0), r"is compressed \(gzip\); unpack it"),
        ("a.txt", lzma.compress(b"a"), r"is compressed \(xz\); unpack it"),
        ("a.jsonl", bz2.compress(b"a"), r"is compressed \(bzip2\); unpack it"),
        ("a.csv", b"a.csv" + bytes(252) + b"ustar", r"is an archive \(tar\); unpack it"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS; fetch"),
        ("a.jsonl", b"PAR1\x15\x04PAR1", r"is a Parquet file; name it .parquet"),
        ("a.json", b"ARROW1\0\0", r"is an Arrow file; save it as .jsonl, .csv or .parquet"),
        ("a.csv", b"\n <!DOCTYPE html><html>", "is a web page, as a download gives"),
        (
            "a.csv",
            b'text,id\n"a,1\nb,2\n',
            '.*end of data; a cell that begins with "',
        ),
        ("a.csv", b"text,text\na,b\n", "two columns are named 'text'; rename one"),
    ],
)
def test_a_broken_file_is_refused_by_its_cause(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}[:,]? {complaint}"):
        list(records(tmp_path / name)) if suffix_of(Path(name)) in READERS else encoding_of(
            tmp_path / name
        )


@pytest.mark.parametrize(
    ("content", "how"),
    [
        ("<html>a", "plain text, a web page, of which its markup"),
        (LINES, "plain text, JSON, learnt as it stands; name the file .jsonl"),
        (json.dumps(ROWS), "plain text, JSON, learnt as it stands"),
    ],
)
def test_text_that_is_more_is_named(bundle: Path, content: str, how: str) -> None:
    file = bundle.parent / "a.txt"
    file.write_text(content)
    assert how in str(tokenize(bundle, file, 400, bundle.parent / "out").report)


def test_a_table_that_begins_as_parquet_does_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("PAR1,PAR2\n1,2\n")
    assert [row for _, row in records(tmp_path / "a.csv")] == [{"PAR1": "1", "PAR2": "2"}]


def test_a_folder_s_files_that_are_no_split_are_named(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="has no train file, and nothing else; name one file, or"):
        prepare_tokens(bundle, tmp_path / "data", "train", 8, tmp_path / "out")
    for name in ("part-1.jsonl", "dataset_infos.json", "notes.md"):
        (tmp_path / "data" / name).write_text('{"text": "a"}')
    with pytest.raises(DataError, match=r"it has 'dataset_infos.json', 'notes.md', 'part-1.jsonl'"):
        prepare_tokens(bundle, tmp_path / "data", "train", 8, tmp_path / "out")
    for name in ("train.jsonl", "eval.jsonl", "dev.csv", "README.txt"):
        (tmp_path / "data" / name).write_text('{"text": "a"}')
    prepare_tokens(bundle, tmp_path / "data", "train", 8, tmp_path / "out")
    report = TokenRows(tmp_path / "out", VOCAB).report
    assert report is not None
    (warning,) = report.warnings
    assert warning.endswith("data also has 'part-1.jsonl', of which nothing is read")
    (tmp_path / "data" / "dev.csv").write_text("text\na\nb\n")
    prepare_tokens(bundle, tmp_path / "data", "valid", 8, tmp_path / "out")
    report = TokenRows(tmp_path / "out", VOCAB).report
    assert report is not None and report.read == 2
    (warning,) = report.warnings  # where it matters, as `ondevice eval` reads no other split
    assert warning.endswith("data also has 'eval.jsonl', of which nothing is read")
    (tmp_path / "data" / "dev.txt").write_text("a")
    with pytest.raises(DataError, match=r"data has dev.csv and dev.txt; keep one, or name"):
        prepare_tokens(bundle, tmp_path / "data", "valid", 8, tmp_path / "out")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"load_from_disk\(FOLDER\)\['train'\].to_json"):
        prepare_tokens(bundle, saved, "train", 8, tmp_path / "out")
    with pytest.raises(DataError, match=r"x.jsonl is an address; download"):
        split_file(Path("https://example.org/x.jsonl"), "train")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{'text': 'a'}", "line 1: .*it is Python's notation: write it with json.dumps"),
        (b'{"text": "a"},', "line 1: .*; there is a comma after it: leave that out"),
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS; fetch the file"),
        (b'{"text": 1e999}', "expected .*; it has 'text'"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "a part that is not text .its type is 'image'.; models here read text, in parts as",
        ),
        (b'{"text": "a", "id": ' + 5000 * b"9" + b"}", "line 1: it has a whole number of more tha"),
        (b'{"text": "a", "text": "b"}', "line 1: it has the key 'text' twice"),
        (b'{"text": "\xe9"}', "line 1: .*save the file in UTF-8"),
        (
            b'{"text": "a"}\n{"text": "b\n',
            r"line 2: Unterminated string starting at: column 10 \(char 9\); --skip-bad-rows",
        ),
        (40 * b"\0", "line 1: Expecting value: .*zeros in place of text, as after a crash"),
        (b'{"text": "a"}\n' + 39 * b"\0", "line 2: Expecting value: .*zeros in place of text"),
    ],
)
def test_a_line_is_refused_by_its_cause(bundle: Path, line: bytes, complaint: str) -> None:
    file = bundle.parent / "rows.jsonl"
    file.write_bytes(line)
    with pytest.raises(DataError, match=complaint):
        tokenize(bundle, file, 8, bundle.parent / "out")


def test_json_may_have_its_rows_in_one_field(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"data": ROWS}))
    assert [row for _, row in records(file)] == ROWS


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'ondevice-tune\[parquet\]', or convert"):
        list(records(tmp_path / "rows.parquet"))


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"a\.parquet, after row 0: "):
        list(records(tmp_path / "a.parquet"))


def test_everything_is_counted(bundle: Path) -> None:
    """Nothing that happens to a row is silent."""
    rows = [
        {"text": "abc"},
        {"text": "a much longer text"},
        {"prompt": "far too long a prompt", "completion": "x"},
        {"text": True},
        {"messages": ASKED},
        {"text": ""},
    ]
    found = read(bundle, *rows, reading=Reading(skip_bad_rows=True), length=8)
    report = found.report
    assert listed(found) == [
        after([BOS, *ids("abc"), EOS]),
        after([BOS, *ids("a much longer text")[:8]]),
    ]
    assert (report.read, report.kept, report.cut, report.skipped) == (6, 2, 1, 1)
    dropped = ("what is scored begins after 8 tokens", "it has no answer", "it is empty")
    assert report.dropped == dict.fromkeys(dropped, 1)
    assert (report.tokens, report.scored) == (4 + 8, 4 + 8)
    too_long = len(ids("far too long a prompt")) + 2
    assert report.lengths == {4: 1, len(ids("a much longer text")) + 1: 1, too_long: 1}
    assert report.warned == len(report.warnings) == 5
    assert "rows.jsonl, line 2: 19 tokens, cut at 8" in report.warnings
    assert "rows.jsonl, line 3: dropped: what is scored begins after 8 tokens" in report.warnings
    assert "rows.jsonl, line 5: dropped: it has no answer" in report.warnings
    assert report.describe([4, 16]).splitlines()[:4] == [
        "rows.jsonl: 6 rows read (text), 2 kept, 1 of them cut at 8 tokens, 1 dropped (what is "
        "scored begins after 8 tokens), 1 dropped (it has no answer), 1 dropped (it is empty), 1 "
        "skipped as unreadable; 12 tokens, 12 of them scored (100%, --loss-on assistant)",
        "  up to 4 tokens                1  ############",
        "  up to 16 tokens               0",
        "  longer than 16                2  ########################",
    ]
    assert report.recommended() == [32]


def test_only_the_first_warnings_are_kept(bundle: Path) -> None:
    report = read(bundle, *({"text": "abcd" * n} for n in range(1, 20)), length=6).report
    assert (len(report.warnings), report.warned, report.cut) == (5, 18, 18)
    assert report.warning_lines()[-1] == "and 13 more such rows"


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_split_is_by_content_and_complete(bundle: Path, tmp_path: Path, suffix: str) -> None:
    """The same rows in another order are split alike, and equal rows stay together."""
    words = [f"row {number % 37}" for number in range(60)]
    reading = Reading(valid_share=0.2)
    texts_of: list[list[set[str]]] = []
    for order in (words, words[::-1]):
        file = tmp_path / f"rows{suffix}"
        lines = order if suffix == ".txt" else [json.dumps({"text": word}) for word in order]
        file.write_text("\n".join(lines))
        parts = [
            tokenize(bundle, file, 8, tmp_path / part, reading, part) for part in ("train", "valid")
        ]
        train, valid = ([str(row) for row, _ in listed(rows)] for rows in parts)
        whole = [str(row) for row, _ in listed(tokenize(bundle, file, 8, tmp_path / "whole"))]
        assert sorted(train + valid) == sorted(whole) and not set(train) & set(valid)
        assert 1 <= len(valid) <= 0.4 * len(whole)
        assert parts[0].report.held_out == len(valid) and parts[1].report.held_out == len(train)
        texts_of.append([set(train), set(valid)])
    if suffix == ".jsonl":
        assert texts_of[0] == texts_of[1]


def test_a_split_that_leaves_nothing_is_refused(bundle: Path) -> None:
    with pytest.raises(DataError, match="--valid-split 5% of 3 rows holds out all, since"):
        read(bundle, *[{"text": "same"}] * 3, reading=Reading(valid_share=0.05))
