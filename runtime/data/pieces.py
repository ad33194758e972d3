"""The text that each token stands for, in a table: tokens become text without the tokenizer.

A tokenizer takes up to half a gigabyte while it is loaded. So a process of its own writes the
table, and the process that holds a model reads it. This takes a tokenizer whose tokens stand for
the same bytes wherever they are; `write_pieces` tries that, and writes nothing for others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.core.files import write_atomic

if TYPE_CHECKING:
    from runtime.data.text_encoder import TextEncoder

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # for bytes that are no whole character
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
ANCHORS = "a0x"  # texts of one token, between which others are looked at
TRIALS, TRIED = 64, 40  # sequences of random tokens on which the table is tried, and their length


class Pieces(msgspec.Struct, frozen=True):
    """The text of tokens: `data[ends[t - 1]:ends[t]]`, in UTF-8; `places` has the ends.

    strips: whether a space at the beginning of a text is left out.
    """

    places: bytes
    data: bytes
    strips: bool

    @property
    def ends(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.places, np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; a character of which bytes are missing becomes `UNKNOWN`."""
        text = b"".join(self._piece(token) for token in tokens).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips else text

    def _piece(self, token: int) -> bytes:
        ends = self.ends
        if token >= len(ends):  # the model embeds more tokens than the tokenizer has
            return b""
        start = int(ends[token - 1]) if token else 0
        return self.data[start : int(ends[token])]


def write_pieces(encoder: TextEncoder, path: Path) -> bool:
    """Write the table of a tokenizer, if its tokens stand for the same bytes everywhere.

    Returns whether they do.
    """
    pieces = _pieces_of(encoder)
    if pieces is None:
        return False
    write_atomic(path, msgspec.msgpack.encode(pieces))
    return True


def read_pieces(path: Path) -> Pieces:
    """The table that `write_pieces` wrote, in a folder of this process's own."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Pieces)


def _pieces_of(encoder: TextEncoder) -> Pieces | None:
    anchor = next((tokens for text in ANCHORS if len(tokens := encoder.encode(text)) == 1), None)
    if anchor is None:
        return None
    before, around = encoder.decode(anchor), encoder.decode(anchor * 2)
    if around != before * 2:
        return None
    pieces = []
    for token in range(encoder.size):
        text = encoder.decode([*anchor, token, *anchor])
        if not (text.startswith(before) and text.endswith(before)):
            return None
        piece = text[len(before) : len(text) - len(before)].encode()
        name = encoder.name_of(token)
        if UNKNOWN in text and UNKNOWN not in name:  # else it does stand for that character
            raw = _raw_bytes(name)
            if raw is None:
                return None
            piece = raw
        pieces.append(piece)
    places = np.cumsum([len(piece) for piece in pieces]).astype(np.uint32).tobytes()
    spaced = next(
        (t for t, piece in enumerate(pieces) if piece[:1] == b" " and len(piece) > 1), None
    )
    strips = spaced is not None and encoder.decode([spaced]) == pieces[spaced].decode()[1:]
    table = Pieces(places, b"".join(pieces), strips)
    return table if _agrees(table, encoder) else None


def _agrees(pieces: Pieces, encoder: TextEncoder) -> bool:
    """Whether random sequences have the tokenizer's own text, but for broken characters.

    Tokens that are a byte are left out: those that together are no characters, SentencePiece shows
    as unknown one and all, also the whole characters among them.
    """
    draws = random.Random(0)
    chosen = [token for token in range(encoder.size) if not BYTE.fullmatch(encoder.name_of(token))]
    for _ in range(TRIALS):
        tokens = draws.choices(chosen, k=TRIED)
        texts = (
            re.sub(f"{UNKNOWN}+", UNKNOWN, decoder.decode(tokens)) for decoder in (pieces, encoder)
        )
        if len(set(texts)) > 1:
            return False
    return True


def _raw_bytes(name: str) -> bytes | None:
    """The bytes of a token that is no whole character, from its name in the vocabulary."""
    if match := BYTE.fullmatch(name):
        return bytes([int(match[1], 16)])
    known = _letters_of_bytes()
    return bytes(known[letter] for letter in name) if set(name) <= set(known) else None


def _letters_of_bytes() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes, as GPT-2's does.

    Printable ones stand for themselves, and the others for letters from 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(256 + index): byte for index, byte in enumerate(others)}
    return letters | {chr(byte): byte for byte in printable}
