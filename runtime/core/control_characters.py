"""Text as a terminal or a page shows it: prose folded, and control characters escaped.

Text from elsewhere, such as rows, tokens and names of files, may have control characters. A
terminal obeys them, so they can clear its screen, retitle it, or hide what stands there. Those
that turn the direction of writing show a text in another order than it has, in a browser too.
"""

from __future__ import annotations

import re
from html import escape
from typing import TextIO

COLUMNS = 80  # of prose, and of a terminal that does not say

# C0 but for tab and line feed, DEL and C1; line and paragraph separators; overrides of direction
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """The text with its control characters as JSON writes them, such as \\u001b."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shown(text: str, stream: TextIO, is_data: bool = False) -> str:
    """The text as a stream is given it: a terminal escaped, and what is no data folded."""
    if not stream.isatty():
        return text
    return escaped(text) if is_data else folded(escaped(text))


def folded(text: str) -> str:
    """The text with lines in at most COLUMNS columns; words and paths stay whole."""
    return "\n".join(line if len(line) <= COLUMNS else _folded(line) for line in text.split("\n"))


def _folded(line: str) -> str:
    from textwrap import TextWrapper

    folding = TextWrapper(COLUMNS, break_on_hyphens=False, break_long_words=False)
    folding.subsequent_indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    return folding.fill(line)


def in_markup(text: str) -> str:
    """The text as HTML and SVG show it: its markup has no effect there."""
    return escape(escaped(text))
