"""Which rows are held out of training where the data have no validation file.

It depends on what the rows say and on nothing else: the same rows in another order are split alike,
and equal rows stay on one side.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable

from runtime.core.errors import DataError


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

    Raises DataError if that leaves nothing to train on.
    """
    numbers = array("Q", digests)
    ordered = sorted(numbers)
    if not ordered:
        return 0
    bound = ordered[max(1, round(share * len(ordered))) - 1] + 1
    if bound > ordered[-1]:
        raise DataError(
            f"--valid-split {share:.0%} of {len(ordered)} rows leaves none to train on that differs"
        )
    return bound
