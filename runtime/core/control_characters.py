"""Control characters in text from elsewhere, such as rows, tokens and names of files.

A terminal obeys them, so they can clear its screen, retitle it, or hide what stands there. Those
that turn the direction of writing show a text in another order than it has, in a browser too.
"""

from __future__ import annotations

import re
from html import escape

# C0 but for tab and line feed, DEL and C1; line and paragraph separators; overrides of direction
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """The text with its control characters as JSON writes them, such as \\u001b."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def in_markup(text: str) -> str:
    """The text as HTML and SVG show it: its markup has no effect there."""
    return escape(escaped(text))
