"""Bytes and seconds as people write them: `300MB` is 300 000 000, `1GiB` is 1 073 741 824."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from runtime.core.errors import UsageError

_FACTORS = {
    **dict.fromkeys(("", "b", "byte", "bytes"), 1),
    **{letter: 10**power for letter, power in zip("kmgt", (3, 6, 9, 12), strict=True)},
    **{letter + "b": 10**power for letter, power in zip("kmgt", (3, 6, 9, 12), strict=True)},
    **{letter + "ib": 2**power for letter, power in zip("kmgt", (10, 20, 30, 40), strict=True)},
}
MOST_BYTES = 1 << 60
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,24}(?:\.[0-9]{1,24})?)\s*(?P<unit>[A-Za-z]*)\s*")
_NAMES = ((10**3, "kB"), (10**6, "MB"), (10**9, "GB"), (10**12, "TB"))


def parse_bytes(text: str | int) -> int:
    """The number of bytes that `text` means; a plain number is bytes already.

    kB, MB, GB, TB (or k, M, G, T) are powers of 1000 and KiB, MiB, GiB, TiB powers of 1024,
    in any case; a fraction of a byte is dropped.

    Raises UsageError for anything else, and for sizes below one byte.
    """
    match = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r:.80} is not a size; write for example 300MB, 1.5GB or 512MiB")
    size_bytes = int(Fraction(match["number"]) * factor)
    if size_bytes < 1:
        raise UsageError(f"{text!r} is less than one byte; write for example 300MB")
    if size_bytes > MOST_BYTES:
        raise UsageError(f"{text!r} is more than any machine has; write for example 300MB")
    return size_bytes


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """A number with its noun: "1 row", "2 rows", "2 batches"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def first_of(texts: Sequence[str], most: int = 5) -> str:
    """The first of some texts in quotes, and how many more there are."""
    more = len(texts) - most
    return ", ".join(f"{text!r:.40}" for text in texts[:most]) + f" and {more} more" * (more > 0)


def format_bytes(size_bytes: int, *, up: bool = False) -> str:
    """`size_bytes` to three digits in powers of 1000: "512 bytes", "1.25 GB", "118 MB".

    With `up` the figure is rounded up, for limits: what it says is never too little, so
    `parse_bytes(format_bytes(n, up=True)) >= n`. Otherwise it is rounded to the nearest.
    """
    if size_bytes < 0:
        return "-" + format_bytes(-size_bytes)
    if size_bytes < 1000:
        return f"{size_bytes} " + ("byte" if size_bytes == 1 else "bytes")
    unit, name = max(pair for pair in _NAMES if pair[0] <= size_bytes)
    decimals = 2 if size_bytes < 10 * unit else 1 if size_bytes < 100 * unit else 0
    grain = unit // 10**decimals
    grains = -(-size_bytes // grain) if up else (size_bytes + grain // 2) // grain
    if grains * grain >= 1000 * unit > size_bytes and name != "TB":
        return format_bytes(1000 * unit)
    number = f"{grains // 10**decimals}"
    if decimals:
        number += f".{grains % 10**decimals:0{decimals}d}".rstrip("0").rstrip(".")
    return f"{number} {name}"


def format_number(value: float) -> str:
    """A number to three digits or more, never as a power: "0.025", "40.8", "1,373"."""
    return f"{Decimal(f'{value:.3g}'):f}" if value < 999.5 else f"{value:,.0f}"


def format_seconds(seconds: float) -> str:
    """A time to about three digits: "0.25 s", "12.3 s", "4 min 05 s", "3 h 20 min"."""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
