"""Token files, whose rows are read one by one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from support.mutations import Rng
from support.token_rows import VOCAB, after, write_rows

from fuzz.kind import Change, Kind, Read, damage, put_in_place, write
from runtime.data.token_rows import HEADER, INDEX, MAGIC, VERSION, TokenRows

FILE = "train.tokens"
ROWS = [after([0, 5, 9, 7, 3]), after([0, 8, 2, 4, 6, 1, 9], 2), after([3, 4])]


def _head(rows: int, tokens: int, report_bytes: int) -> Change:
    return write(FILE, HEADER.pack(MAGIC, VERSION, 8, rows, tokens, report_bytes))


class TokenFiles(Kind):
    """Token files as a run keeps them."""

    name = "tokens"
    known: ClassVar[dict[str, Change]] = {
        "countless rows": _head(2**64 - 1, 2, 0),
        "countless tokens": _head(1, 2**63, 0),
        "endless report": _head(1, 2, 2**64 - 1),
        "sizes that wrap around": _head(2**62, 2**62, 2**62),
        "empty": write(FILE, b""),
    }

    def prepare(self, folder: Path) -> None:
        (folder / "original").mkdir()
        write_rows(folder / "original" / FILE, ROWS)

    def change(self, folder: Path, rng: Rng) -> object:
        if rng.random() < 0.02:
            return put_in_place(folder / FILE, rng)
        upto = HEADER.size + len(ROWS) * INDEX.itemsize if rng.random() < 0.6 else None
        return damage(folder / FILE, rng, upto)

    def read(self, folder: Path, original: Path) -> Read:
        rows = TokenRows(folder / FILE, VOCAB)
        found = [rows.row(index) for index in range(len(rows))]
        for tokens, scored in found:
            inside = tokens.min() >= 0 and tokens.max() < VOCAB
            if not (inside and 0 < len(scored) < len(tokens) and scored.max() < len(tokens) - 1):
                raise AssertionError(f"a row that cannot be trained on: {tokens}, {scored}")
        return Read(0, [[tokens.tolist(), scored.tolist()] for tokens, scored in found])
