"""Files of records: JSON lines, JSON, CSV and Parquet, one object with fields after the other."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.core.documents import from_json
from runtime.core.errors import DataError

Records = Iterator[tuple[str, object]]
"""The place of each record in its file, and the record, or the ValueError that it was."""

TEXT = ".txt"
_BATCH_ROWS = 64  # of a Parquet file


def records(file: Path) -> Records:
    """The records of a file, by its suffix. Raises DataError where the file cannot be read."""
    try:
        yield from READERS[file.suffix](file)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def _json_lines(file: Path) -> Records:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"line {number}", _loaded(line)


def _loaded(line: bytes) -> object:
    try:
        return from_json(line)
    except ValueError as error:
        return ValueError(str(error))


def _json(file: Path) -> Records:
    rows = _loaded(file.read_bytes())
    if isinstance(rows, dict) and len(rows) == 1:
        (rows,) = rows.values()
    if not isinstance(rows, list):
        why = f": {rows}" if isinstance(rows, ValueError) else ""
        raise DataError(f"{file} holds no JSON list of rows{why}; write one row a line as .jsonl")
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


def _csv(file: Path) -> Records:
    csv.field_size_limit(2**31 - 1)
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, strict=True)
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not text in UTF-8: {error}") from error
            except csv.Error as error:
                raise DataError(f"{file}, line {reader.line_num}: {error}") from error
            wide = None in row or None in row.values()
            place = f"line {reader.line_num}"
            yield place, ValueError("it has not as many cells as the header") if wide else row


def _parquet(file: Path) -> Records:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(
            f"{file}: reading .parquet needs pyarrow: pip install 'ondevice-tune[parquet]', or "
            "convert the file to .jsonl"
        ) from None
    number = 0
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except ArrowException as error:
        raise DataError(f"{file}, after row {number}: {error}") from error


READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
