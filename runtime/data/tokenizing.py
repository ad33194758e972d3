"""`python -m runtime.data.tokenizing`: text into a token file (see `runtime.data.rows`), then exit.

Memory is bounded whatever the size of the corpus: text goes through in chunks, rows go to spool
files, and the token file appears whole under its name or not at all.

A chunk of plain text ends at a line break, and only at one where the lines on either side give
the same tokens joined as apart. That is nearly every break before a line that does not begin
with white space, since neither word patterns nor merges reach across it; there the tokens are
those of the whole text at once. A tokenizer that marks the beginning of each text (with a
prefixed space, say) has no such break; it is cut all the same, every megabyte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ondevice.errors import DataError, OnDeviceError, StorageError
from runtime.data.rows import HEADER, MAGIC, VERSION
from runtime.data.text_encoder import TextEncoder, load_encoder

CHUNK_CHARS = 2**16
MAX_CHUNK_CHARS = 2**20
_ENTRY = struct.Struct("<qII")  # runtime.data.rows.INDEX

Row = tuple[list[int], int]
"""Tokens, and the index of the first target that has a loss."""


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


def packed_rows(parts: Iterable[list[int]], bos: int | None, seq_length: int) -> Iterator[Row]:
    """A stream of tokens, given in parts, as rows of `seq_length` targets; the last may be short.

    With `bos` each row is this token and the next `seq_length` tokens, without it `seq_length` + 1
    tokens of which the first is the last of the row before: each token is a target once (but,
    without `bos`, for the very first).
    """
    first = [] if bos is None else [bos]
    taken = seq_length + 1 - len(first)
    held: list[int] = []
    for part in parts:
        held += part
        at = 0
        while len(held) - at >= taken:
            yield first + held[at : at + taken], 0
            at += seq_length
        del held[:at]
    if len(first) + len(held) >= 2:
        yield first + held, 0


def json_row(line: bytes, encoder: TextEncoder, seq_length: int) -> Row | None:
    """One line of JSONL as a row; None if nothing to predict is left within `seq_length`.

    `{"text"}` predicts all of it, `{"prompt", "completion"}` the completion; EOS follows, and
    BOS comes first, where the tokenizer has them. `{"messages"}` (and `"tools"`) predicts the
    last message, with the special tokens that the chat template writes and no others. The
    row begins with the tokens of what is given, as it does when a model completes a prompt.
    Raises ValueError, and DataError if a chat template is wanted and missing.
    """
    value = json.loads(line)
    row = value if isinstance(value, dict) else {}
    head = [] if encoder.bos is None else [encoder.bos]
    tail = [] if encoder.eos is None else [encoder.eos]
    if "messages" in row:
        given, learnt = encoder.chat().exchange(row["messages"], row.get("tools"))
        head = tail = []
    elif isinstance(row.get("text"), str):
        given, learnt = "", row["text"]
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        given, learnt = row["prompt"], row["completion"]
    else:
        raise ValueError(
            'expected {"text": "..."}, {"prompt": "...", "completion": "..."} or {"messages": '
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
        )
    for text in (given, learnt):
        text.encode()  # ValueError for half a surrogate pair, which is no text
    prompt = encoder.encode(given) if given else []
    body = encoder.encode(given + learnt)
    if body[: len(prompt)] != prompt:  # a token lies across: a model is given the prompt's own
        body = prompt + encoder.encode(learnt)
    prompt = head + prompt
    tokens = (head + body + tail)[: seq_length + 1]
    loss_start = max(len(prompt) - 1, 0)
    return (tokens, loss_start) if loss_start <= len(tokens) - 2 else None


def read_rows(file: Path, encoder: TextEncoder, seq_length: int) -> Iterator[Row | None]:
    """The rows of a .txt or .jsonl file in UTF-8; None for each that had to be dropped.

    Raises DataError, naming the line where JSON is wrong.
    """
    if file.suffix == ".jsonl":
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if not line.strip():
                    continue
                try:
                    yield json_row(line, encoder, seq_length)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{file}, line {number}: {error}") from error
    elif file.suffix == ".txt":
        with file.open(encoding="utf-8-sig") as text:
            lines = iter(lambda: text.readline(MAX_CHUNK_CHARS), "")
            parts = map(encoder.encode, text_chunks(lines, encoder.encode))
            try:
                yield from packed_rows(parts, encoder.bos, seq_length)
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not text in UTF-8: {error}") from error
    else:
        raise DataError(f"{file} is neither .txt nor .jsonl; rename or convert it")


def write_token_file(rows: Iterable[Row | None], seq_length: int, out_file: Path) -> int:
    """Write `rows` as a token file, atomically; returns how many there were.

    Raises DataError if there are none to write.
    """
    folder = out_file.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    count = dropped = end = 0
    part = folder / f".{out_file.name}.{os.getpid()}.part"
    with (
        tempfile.TemporaryFile(dir=folder) as index,
        tempfile.TemporaryFile(dir=folder) as tokens,
    ):
        for row in rows:
            if row is None:
                dropped += 1
                continue
            ids = array("i", row[0])
            if sys.byteorder == "big":
                ids.byteswap()
            index.write(_ENTRY.pack(end, len(ids), row[1]))
            tokens.write(ids.tobytes())
            end += len(ids)
            count += 1
        if count == 0:
            if dropped:
                raise DataError(
                    f"no tokens to train on: all {dropped} rows are too long or empty; add data or "
                    "raise --max-seq-length"
                )
            raise DataError("no tokens to train on: it is empty")
        try:
            with part.open("wb") as out:
                out.write(HEADER.pack(MAGIC, VERSION, seq_length, dropped, count, end))
                for spool in (index, tokens):
                    spool.seek(0)
                    shutil.copyfileobj(spool, out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(out_file)
        finally:
            part.unlink(missing_ok=True)
    handle = os.open(folder, os.O_RDONLY)  # the rename itself, too
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return count


def main(argv: list[str] | None = None) -> int:
    """Run the command; complaints go to stderr. Returns the exit code of `ondevice.errors`."""
    parser = argparse.ArgumentParser(prog="python -m runtime.data.tokenizing", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="bundle with the tokenizer")
    parser.add_argument("--input", type=Path, required=True, help=".txt or .jsonl file")
    parser.add_argument("--seq-length", type=int, required=True, help="tokens predicted per row")
    parser.add_argument("--output", type=Path, required=True, help="token file to write")
    given: Any = parser.parse_args(argv)
    try:
        encoder = load_encoder(given.bundle)
        if not os.access(given.input, os.R_OK):
            raise DataError(f"cannot read {given.input}; name a .txt or .jsonl file")
        rows = read_rows(given.input, encoder, given.seq_length)
        try:
            write_token_file(rows, given.seq_length, given.output)
        except DataError as error:
            named = str(given.input) in str(error)
            raise error if named else DataError(f"{given.input}: {error}") from None
        except OSError as error:
            raise StorageError(f"cannot write {given.output}: {error.strerror}") from error
    except OnDeviceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
