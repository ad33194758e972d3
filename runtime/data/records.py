"""Files of records: JSON lines, JSON, CSV, TSV and Parquet, one object with fields after another.

What a file is follows from its content where its name says otherwise: an array in a .jsonl file,
lines in a .json file, another delimiter than a comma, UTF-16 with a byte order mark.
"""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.core.documents import from_json_once, from_json_values
from runtime.core.errors import DataError
from runtime.core.lookalikes import FETCH, LFS_POINTER
from runtime.core.notes import Note, silent
from runtime.data.fields import shown

Records = Iterator[tuple[str, object]]
"""The place of each record in its file, and the record, or the ValueError that it was."""

TEXT = ".txt"
_BATCH_ROWS = 64  # of a Parquet file
_BYTE_ORDER_MARKS = {  # the longer first: that of UTF-32 begins as that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_BY_ZEROS = {(False, True): "utf-16-le", (True, False): "utf-16-be"}  # at even and at odd places
_UTF8 = "utf-8-sig"
_HEAD_BYTES, _TEXT_BYTES = 512, 64
_UNPACK, _CONVERT = "unpack it, or save it as text", "save it as .jsonl, .csv or .parquet"
# how files of other kinds begin, what they are, and the way out
_OTHERS = {
    b"\x1f\x8b": ("compressed (gzip)", _UNPACK),
    b"PK\x03\x04": ("compressed (zip, as .xlsx is too)", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed (zstd)", _UNPACK),
    b"\xfd7zXZ": ("compressed (xz)", _UNPACK),
    b"BZh91AY&SY": ("compressed (bzip2)", _UNPACK),
    b"7z\xbc\xaf": ("compressed (7z)", _UNPACK),
    b"\x04\x22\x4d\x18": ("compressed (lz4)", _UNPACK),
    b"Rar!\x1a\x07": ("compressed (rar)", _UNPACK),
    b"ARROW1\0\0": ("an Arrow file", _CONVERT),
    b"SQLite format 3": ("a database (SQLite)", _CONVERT),
    b"%PDF-": ("a PDF file", "save its text"),
    LFS_POINTER: (FETCH.partition(":")[0], FETCH.partition(": ")[2]),
}
_PARQUET = b"PAR1"  # its first bytes, and its last ones
_PAGES = (b"<!doctype html", b"<html")
_UNCLOSED = 'a cell that begins with " does not end with it; a " inside a cell is written twice'
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_OF_ROWS = ("messages", "conversations")  # lists that are one row's, not a list of rows


def suffix_of(file: Path) -> str:
    """The suffix by which a file is read, in small letters."""
    return file.suffix.lower()


def records(file: Path, say: Note = silent) -> Records:
    """The records of a file, by its suffix; `say` is told first of what is unusual.

    Raises DataError where the file cannot be read.
    """
    try:
        yield from READERS[suffix_of(file)](file, say)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def encoding_of(file: Path, say: Note = silent) -> str:
    """The encoding of a text file: UTF-8, or UTF-16 or UTF-32, mostly by their byte order marks.

    UTF-16 without a mark is known by its zeros, which no text in UTF-8 has. Raises OSError, and
    DataError for a file that is no text.
    """
    head = _checked_head(file)[:_TEXT_BYTES]
    if head.startswith(_PARQUET) and _last_bytes(file) == _PARQUET:
        raise DataError(f"{file} is a Parquet file; name it .parquet")
    if _is_page(head):
        say("a web page, of which its markup is learnt too")
    if suffix_of(file) == TEXT and head.lstrip().startswith((b'{"', b'[{"')):
        say("JSON, learnt as it stands; name the file .jsonl to have its rows read")
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            say(f"in {encoding.upper()}")
            return encoding
    zeros = (not any(head[::2]), not any(head[1::2]))
    if len(head) >= 4 and zeros in _BY_ZEROS:
        say("in UTF-16")
        return _BY_ZEROS[zeros]
    return _UTF8


def _last_bytes(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-len(_PARQUET), os.SEEK_END)
        return opened.read()


def _checked_head(file: Path) -> bytes:
    """The first bytes of a file. Raises DataError where they are of a file of another kind."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    for mark, (kind, way_out) in _OTHERS.items():
        if head.startswith(mark):
            raise DataError(f"{file} is {kind}; {way_out}")
    if head[257:262] == b"ustar":
        raise DataError(f"{file} is an archive (tar); {_UNPACK}")
    if suffix_of(file) != TEXT and _is_page(head):
        raise DataError(
            f"{file} is a web page, as a download gives where one must sign in; fetch the data "
            "themselves"
        )
    return head


def _is_page(head: bytes) -> bool:
    return head.lstrip().lower().startswith(_PAGES)


def not_text(file: Path, encoding: str, error: UnicodeError) -> DataError:
    """The error for a file whose bytes are not text in its encoding."""
    name = encoding.removesuffix("-sig").upper()
    return DataError(f"{file} is not text in {name}: {error}; save it in UTF-8")


def _json_lines(file: Path, say: Note) -> Records:
    encoding = encoding_of(file, say)
    first = next((row for _, row in _rows_of_lines(file, encoding)), None)
    if isinstance(first, list | ValueError):  # no row: a longer document, or one that is broken
        try:
            text = file.read_bytes().decode(encoding)
        except UnicodeError:  # of one line, maybe
            text = ""
        whole = _loaded(text)
        if isinstance(whole, list) and any(isinstance(row, dict) for row in whole):
            return _listed(whole, "in a JSON array", say)
        if isinstance(first, ValueError) and isinstance(whole, ValueError):
            if rows := _one_after_another(text):
                return _listed(rows, "over several lines each", say)
            if text.lstrip().startswith("[") and str(first) != str(whole):  # not of this line alone
                raise DataError(f"{file} holds a JSON array that is broken: {whole}")
    return _rows_of_lines(file, encoding)


def _rows_of_lines(file: Path, encoding: str) -> Records:
    for number, line in enumerate(_lines(file, encoding), 1):
        if line.strip():
            yield f"line {number}", _loaded(line)


def _lines(file: Path, encoding: str) -> Iterator[str | bytes]:
    """The lines of a file, as bytes in UTF-8: one that is no text spoils no other."""
    if encoding == _UTF8:
        with file.open("rb") as lines:
            yield from lines
        return
    with file.open(encoding=encoding, newline="\n") as text:
        try:
            yield from text
        except UnicodeError as error:
            raise not_text(file, encoding, error) from error


def _loaded(text: str | bytes) -> object:
    try:
        text = text.decode(_UTF8) if isinstance(text, bytes) else text  # json.loads guesses others
        return from_json_once(text.rstrip("\r\n"))  # else an open string is a control character
    except UnicodeDecodeError as error:
        return ValueError(f"{error}; save the file in UTF-8")
    except ValueError as error:
        place = "" if "\n" in str(text).rstrip() else "line 1 "  # the caller knows a row's line
        return ValueError(f"{str(error).replace(place, '')}{_hint(str(text))}")


def _hint(text: str) -> str:
    """The likely cause why a text is no JSON; empty where none is known."""
    if text.lstrip().startswith("{'"):
        return "; it is Python's notation: write it with json.dumps"
    if text.rstrip().endswith("},"):
        return "; there is a comma after it: leave that out"
    if "\0" in text:
        return "; there are zeros in place of text, as after a crash: fetch or write the file again"
    return ""


def _one_after_another(text: str) -> list[object]:
    """The objects of a text that holds objects alone, one after another; else nothing."""
    try:
        values = from_json_values(text)
    except ValueError:
        return []
    return values if all(isinstance(value, dict) for value in values) else []


def _listed(rows: list[object], reading: str, say: Note) -> Records:
    if reading:
        say(reading)
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))


def _json(file: Path, say: Note) -> Records:
    encoding = encoding_of(file, say)
    try:
        text = file.read_bytes().decode(encoding)
    except UnicodeError as error:
        raise not_text(file, encoding, error) from error
    whole = _loaded(text)
    if isinstance(whole, dict) and len(whole) == 1 and not whole.keys() & set(_OF_ROWS):
        (whole,) = whole.values()
    if isinstance(whole, list):
        return _listed(whole, "", say)
    first = next((row for _, row in _rows_of_lines(file, encoding)), None)
    if isinstance(first, dict) and isinstance(whole, ValueError):
        say("one a line")
        return _rows_of_lines(file, encoding)
    if isinstance(whole, ValueError) and (rows := _one_after_another(text)):
        return _listed(rows, "over several lines each", say)
    why = f": {whole}" if isinstance(whole, ValueError) else ""
    why = f", but an object with {shown(whole)}" if isinstance(whole, dict) else why
    raise DataError(f"{file} holds no JSON list of rows{why}; write one row a line as .jsonl")


def _csv(file: Path, say: Note) -> Records:
    """The rows of a table with a header.

    It is delimited by commas, or tabs in a .tsv file, or by what its first line names ("sep=;", as
    Excel writes) or its header has in place of them.
    """
    csv.field_size_limit(2**31 - 1)
    encoding = encoding_of(file, say)
    with file.open(encoding=encoding, newline="") as text:
        try:
            usual = "\t" if suffix_of(file) == ".tsv" else ","
            delimiter, skipped = _delimiter(text.readline(), usual)
            text.seek(0)
            if skipped:
                text.readline()
            if delimiter != usual:
                say(f"separated by {_DELIMITERS[delimiter]}")
            reader = csv.DictReader(text, strict=True, delimiter=delimiter)
            _name_columns(reader, say)
            names = reader.fieldnames or ()
            if twice := [name for name in names if list(names).count(name) > 1]:
                raise DataError(f"{file}: two columns are named {twice[0]!r}; rename one")
            for row in reader:
                wide = None in row or None in row.values()
                place = f"line {reader.line_num + skipped}"
                yield place, ValueError("it has not as many cells as the header") if wide else row
        except UnicodeError as error:
            raise not_text(file, encoding, error) from error
        except csv.Error as error:
            why = f"; {_UNCLOSED}" * str(error).startswith("unexpected end")
            raise DataError(f"{file}, line {reader.line_num + skipped}: {error}{why}") from error


def _delimiter(first_line: str, usual: str) -> tuple[str, int]:
    """What separates the cells below a first line, and how many lines stand before the header."""
    line = first_line.rstrip("\r\n")
    if line.lower().startswith("sep=") and line[4:] in _DELIMITERS:
        return line[4:], 1
    unquoted = "".join(line.split('"')[::2])
    there = [mark for mark in _DELIMITERS if mark in unquoted]
    return (there[0] if len(there) == 1 and usual not in unquoted else usual), 0


def _name_columns(reader: csv.DictReader[str], say: Note) -> None:
    """Leave out the spaces around the names in a header, where they stay different names."""
    names = list(reader.fieldnames or ())
    stripped = [name.strip() for name in names]
    if stripped != names and len(set(stripped)) == len(names):
        say("with spaces in the header left out")
        reader.fieldnames = stripped


def _parquet(file: Path, say: Note) -> Records:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{file}: reading .parquet needs pyarrow: pip install 'ondevice-tune[parquet]', or "
            "convert the file to .jsonl"
        ) from None
    number = 0
    _checked_head(file)
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except ArrowException as error:
        raise DataError(f"{file}, after row {number}: {error}") from error


READERS: dict[str, Callable[[Path, Note], Records]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
