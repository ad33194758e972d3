"""From a file of data to a token file (see `runtime.data.token_rows`), in a process of its own.

Memory is bounded whatever the size of the corpus (but for .json files): text goes through in
chunks, rows go to spool files, and the token file appears whole under its name or not at all.

A chunk of plain text ends at a line break, and only at one where the lines on either side give
the same tokens joined as apart. That is nearly every break before a line that does not begin
with white space, since neither word patterns nor merges reach across it; there the tokens are
those of the whole text at once. A tokenizer that marks the beginning of each text (with a
prefixed space, say) has no such break; it is cut all the same, every megabyte.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from runtime.config.shared import DATA_FILE
from runtime.core.errors import DataError, StorageError
from runtime.core.files import flush, flush_path
from runtime.core.units import counted, first_of
from runtime.data.fields import Recognised, recognise
from runtime.data.loss_mask import Row, row_of
from runtime.data.process import tell
from runtime.data.records import READERS, TEXT, encoding_of, not_text, records, suffix_of
from runtime.data.report import DataReport
from runtime.data.source import Reading
from runtime.data.text_encoder import TextEncoder, load_encoder
from runtime.data.token_rows import HEADER, MAGIC, VERSION

T = TypeVar("T")
TELL_S = 2.0  # so often is told how much has been read
CHUNK_CHARS = 2**16
MAX_CHUNK_CHARS = 2**20
TRAIN, VALID = "train", "valid"
NOT_EMBEDDED = "the model does not embed all of its tokens"
HALF = "; it is half of an emoji or another character, as where a text was cut: remove it"
TOO_LATE = "what is scored begins after"
RESIZE = "resize its embedding in transformers (resize_token_embeddings) and export that"
_ENTRY = struct.Struct("<qI")  # runtime.data.token_rows.INDEX


def text_chunks(lines: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[str]:
    """Lines joined into chunks of about CHUNK_CHARS, cut as the module describes."""
    held: list[str] = []
    size = 0
    for line in lines:
        if size >= CHUNK_CHARS:
            last = held[-1]
            if size >= MAX_CHUNK_CHARS or encode(last + line) == encode(last) + encode(line):
                yield "".join(held)
                held, size = [], 0
        held.append(line)
        size += len(line)
    if held:
        yield "".join(held)


def packed_rows(parts: Iterable[list[int]], bos: int | None, max_seq_length: int) -> Iterator[Row]:
    """A stream of tokens in parts as rows of n = `max_seq_length` targets; the last may be short.

    With `bos` each row is this token and the next n tokens, without it n + 1
    tokens of which the first is the last of the row before: each token is a target once (but,
    without `bos`, for the very first).
    """
    first = [] if bos is None else [bos]
    taken = max_seq_length + 1 - len(first)
    held: list[int] = []
    for part in parts:
        held += part
        at = 0
        while len(held) - at >= taken:
            yield _all_scored(first + held[at : at + taken])
            at += max_seq_length
        del held[:at]
    if len(first) + len(held) >= 2:
        yield _all_scored(first + held)


def _all_scored(tokens: list[int]) -> Row:
    return Row(tokens, b"\0" + b"\1" * (len(tokens) - 1))


class Reader:
    """Reads a file of data as rows of at most `max_seq_length` tokens to predict; counts them.

    `part` is "train" or "valid", which differ only under a `--valid-split`. Rows with a token
    beyond the `embedded` ones of the model are dropped. While it takes long, `tell` is called with
    the rows read, of a text its lines, and how many there are. Raises DataError for a file of
    another type.
    """

    def __init__(
        self,
        file: Path,
        encoder: TextEncoder,
        max_seq_length: int,
        reading: Reading,
        part: str = TRAIN,
        embedded: int | None = None,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        suffix = suffix_of(file)
        if suffix != TEXT and suffix not in READERS:
            with suppress(OSError):
                encoding_of(file)  # raises, where it is known what it is
            raise DataError(f"{file} is not {DATA_FILE}; rename or convert it")
        self.file, self.encoder, self.max_seq_length = file, encoder, max_seq_length
        self.reading, self.part, self.embedded = reading, part, embedded
        self._tell, self._told_at, self._total = tell, time.monotonic(), 0
        loss_on = "all" if suffix == TEXT else reading.loss_on
        self._how: list[str] = []  # what is unusual about the file
        self._unknown: set[str] = set()  # what of plain text has no tokens
        self.report = DataReport(
            source=file.name, loss_on=loss_on, seq_length=max_seq_length, is_valid=part == VALID
        )

    def rows(self) -> Iterator[Row]:
        """The rows, once; the report is complete after the last.

        Raises DataError, naming the line where a record is wrong.
        """
        return self._text_rows() if suffix_of(self.file) == TEXT else self._record_rows()

    def _text_rows(self) -> Iterator[Row]:
        self._warn_of_others()
        below = self._bound(lambda: (_bytes_of(row) for row in self._packed()))
        for row in self._packed():
            self.report.read += 1
            if self._belongs(_bytes_of(row), below):
                self.report.measure(row.predicted_tokens)
                if not self._embeds(row):
                    self.report.drop(NOT_EMBEDDED)
                    continue
                yield self._counted(row, "plain text")
        if self._unknown:
            shown = first_of(sorted(self._unknown))
            self.report.warn(f"{self.file.name}: the tokenizer has no token for {shown}")

    def _warn_of_others(self) -> None:
        if self.reading.beside:
            others = first_of(self.reading.beside)
            self.report.warn(f"{self.file.parent} also has {others}, of which nothing is read")

    def _packed(self) -> Iterator[Row]:
        self._how.clear()  # the file is read twice where rows are held out
        encoding = encoding_of(self.file, self._how.append)
        with self.file.open(encoding=encoding) as text:
            lines = self._counting(iter(lambda: text.readline(MAX_CHUNK_CHARS), ""))
            parts = map(self._encoded, text_chunks(lines, self.encoder.encode))
            try:
                yield from packed_rows(parts, self.encoder.bos, self.max_seq_length)
            except UnicodeError as error:
                raise not_text(self.file, encoding, error) from error

    def _encoded(self, text: str) -> list[int]:
        self._unknown.update(self.encoder.unknown_in(text))
        return self.encoder.encode(text)

    def _record_rows(self) -> Iterator[Row]:
        self._warn_of_others()
        below = self._bound(lambda: (record for _, record in records(self.file)))
        for place, record in self._counting(records(self.file, self._how.append)):
            self.report.read += 1
            if not self._belongs(record, below):
                continue
            try:
                if isinstance(record, ValueError):
                    raise record
                recognised = recognise(record, self.reading.columns, self.encoder.has_template)
                whole = _row(recognised, self.encoder, self.reading)
            except DataError as error:
                raise DataError(f"{self.file}, {place}: {error}") from error
            except ValueError as error:
                why = f"{error}{HALF * isinstance(error.__cause__ or error, UnicodeEncodeError)}"
                if not self.reading.skip_bad_rows:
                    way_out = "--skip-bad-rows leaves such rows out"
                    raise DataError(f"{self.file}, {place}: {why}; {way_out}") from error
                self.report.skipped += 1
                self._warn(place, f"skipped: {why}")
                continue
            self.report.lose(*recognised.lost, *whole.lost)
            for warning in whole.warnings:
                self._warn(place, warning)
            row = whole.shortened(self.max_seq_length)
            if any(whole.scored) and not whole.dropped:
                self.report.measure(whole.predicted_tokens)
            reason = _unusable(whole, row) or ("" if self._embeds(row) else NOT_EMBEDDED)
            if reason:
                self.report.drop(reason)
                self._warn(place, f"dropped: {reason}")
                continue
            if row.cut:
                self._warn(place, f"{whole.predicted_tokens} tokens, cut at {self.max_seq_length}")
            yield self._counted(row, recognised.format)

    def _counting(self, parts: Iterable[T]) -> Iterator[T]:
        """The same records, or lines of text; how many there are is told while it takes long."""
        for done, part in enumerate(parts):
            if time.monotonic() - self._told_at >= TELL_S:
                self._total = self._total or self._count()
                self._tell(done, self._total)
                self._told_at = time.monotonic()
            yield part

    def _count(self) -> int:
        """How many records there are, or lines of text."""
        if suffix_of(self.file) != TEXT:
            return sum(1 for _ in records(self.file))
        with self.file.open(encoding=encoding_of(self.file)) as text:
            return sum(1 for _ in iter(lambda: text.readline(MAX_CHUNK_CHARS), ""))

    def _embeds(self, row: Row) -> bool:
        """Whether the model embeds all tokens of a row; those that it does not are counted."""
        if self.embedded is None:
            return True
        beyond = sorted({token for token in row.tokens if token >= self.embedded})
        self.report.lose(
            *(
                f"the token {self.encoder.name_of(token)!r:.40} (number {token}), and the model "
                f"embeds {self.embedded}: {RESIZE}"
                for token in beyond
            )
        )
        return not beyond

    def _bound(self, rows: Callable[[], Iterable[object]]) -> int:
        """The digest below which rows are held out; 0 if none are."""
        share = self.reading.valid_share
        return held_out_below(map(digest, rows()), share) if share else 0

    def _belongs(self, row: object, below: int) -> bool:
        """Whether a row is of this part, under a split; those of the other are counted."""
        if not below:
            return True
        belongs = (digest(row) < below) == (self.part == VALID)
        self.report.held_out += not belongs
        return belongs

    def _counted(self, row: Row, name: str) -> Row:
        report, name = self.report, ", ".join([name, *self._how])
        report.kept += 1
        report.cut += row.cut > 0
        report.tokens += row.predicted_tokens
        report.scored += sum(row.scored)
        report.formats[name] = report.formats.get(name, 0) + 1
        return row

    def _warn(self, place: str, text: str) -> None:
        self.report.warn(f"{self.file.name}, {place}: {text}")


def _bytes_of(row: Row) -> bytes:
    return array("i", row.tokens).tobytes()


def _row(recognised: Recognised, encoder: TextEncoder, reading: Reading) -> Row:
    """The row of a record; one that is not to be learnt has no tokens."""
    if recognised.dropped:
        return Row([], b"", dropped=recognised.dropped)
    return row_of(recognised.example, encoder, reading.loss_on, reading.keep_empty)


def _unusable(whole: Row, row: Row) -> str:
    """Why a row teaches nothing; empty if it does."""
    if whole.dropped:
        return whole.dropped
    if any(row.scored):
        return ""
    if any(whole.scored):
        return f"{TOO_LATE} {row.predicted_tokens} tokens"
    return "it is empty" if whole.predicted_tokens == 0 else "it has no answer"


def digest(row: object) -> int:
    """64 bits of a hash of a record (by its JSON), a row of tokens, or an error."""
    if isinstance(row, bytes):
        text = row
    elif isinstance(row, ValueError):
        text = str(row).encode(errors="surrogatepass")
    else:
        text = json.dumps(row, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def held_out_below(digests: Iterable[int], share: float) -> int:
    """Rows with a digest below this are held out: `share` of them, and at least one.

    So the same rows in another order are split alike, and equal rows stay on one side.

    Raises DataError if that leaves nothing to train on.
    """
    numbers = array("Q", digests)
    ordered = sorted(numbers)
    if not ordered:
        return 0
    bound = ordered[max(1, round(share * len(ordered))) - 1] + 1
    if bound > ordered[-1]:
        raise DataError(
            f"--valid-split {share:.0%} of {counted(len(ordered), 'row')} holds out all, since "
            "equal rows stay together; give more rows that differ, or --eval-data in its place"
        )
    return bound


def write_token_file(
    rows: Iterable[Row], seq_length: int, out_file: Path, report: DataReport
) -> None:
    """Write `rows` as a token file, atomically; `report` is written after the last row.

    Raises DataError if there are none to write.
    """
    folder = out_file.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    count = end = 0
    part = folder / f".{out_file.name}.{os.getpid()}.partial"
    with (
        tempfile.TemporaryFile(dir=folder) as index,
        tempfile.TemporaryFile(dir=folder) as tokens,
        tempfile.TemporaryFile(dir=folder) as scored,
    ):
        for row in rows:
            ids = array("i", row.tokens)
            if sys.byteorder == "big":
                ids.byteswap()
            index.write(_ENTRY.pack(end, len(ids)))
            tokens.write(ids.tobytes())
            scored.write(row.scored)
            end += len(ids)
            count += 1
        if count == 0:
            raise DataError(_nothing(report))
        told = msgspec.json.encode(report)
        try:
            with part.open("wb") as out:
                out.write(HEADER.pack(MAGIC, VERSION, seq_length, count, end, len(told)))
                for spool in (index, tokens, scored):
                    spool.seek(0)
                    shutil.copyfileobj(spool, out)
                out.write(told)
                out.flush()
                flush(out.fileno())
            part.replace(out_file)
        finally:
            part.unlink(missing_ok=True)
    flush_path(folder)  # the rename itself, too


def _nothing(report: DataReport) -> str:
    if report.read == 0:
        return "no tokens to train on: it is empty"
    if report.held_out == report.read:
        return f"no row is left: all {report.read} are in the other part of --valid-split"
    why = "every row is left out, for what follows"
    if report.dropped.get(NOT_EMBEDDED):
        why = "rows with a token that the model does not embed are left out"
    elif any(reason.startswith(TOO_LATE) for reason in report.dropped):
        why = "every row is too long or empty; add data or raise --max-seq-length"
    return "\n".join([f"no row is left: {why}", report.counts(), *report.warning_lines()])


def tokenize(
    bundle_dir: Path,
    file: Path,
    max_seq_length: int,
    output: Path,
    reading: Reading,
    part: str,
    embedded: int | None,
) -> None:
    """Write a file of data as a token file, as `Reader` reads it with the bundle's tokenizer.

    Raises DataError for data or a tokenizer that cannot be used, StorageError if the file cannot
    be written.
    """
    encoder = load_encoder(bundle_dir)
    if not os.access(file, os.R_OK):
        raise DataError(f"cannot read {file}: permission denied; allow it (chmod u+r)")
    reader = Reader(file, encoder, max_seq_length, reading, part, embedded, tell)
    try:
        write_token_file(reader.rows(), max_seq_length, output, reader.report)
    except DataError as error:
        raise error if str(file) in str(error) else DataError(f"{file}: {error}") from None
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}") from error
