"""Text in HTML and SVG: neither its markup nor its control characters have an effect there."""

from __future__ import annotations

from html import escape

from runtime.core.control_characters import escaped


def in_markup(text: str) -> str:
    """The text as a page or a picture shows it."""
    return escape(escaped(text))
