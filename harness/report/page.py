"""A page of HTML that needs no other file: it contains its pictures, and all text is escaped.

Its colours follow the reader's choice of light or dark.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from harness.report import chart

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --muted: #555; --rule: #ddd;
        --c0: #0072b2; --c1: #d55e00; --c2: #007a58; --c3: #b0568a; --c4: #8a6d00; --c5: #3d3d3d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181b; --muted: #a8adb3; --rule: #33373c;
          --c0: #56b4e9; --c1: #ff9c4a; --c2: #3ccf9f; --c3: #e79bc6; --c4: #e6c84a;
          --c5: #c9c9c9; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
       color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
h1, h2, p { overflow-wrap: anywhere; }
figure { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; text-align: right;
         border-bottom: 1px solid var(--rule); }
th { border-bottom: 1px solid var(--muted); font-weight: 600; vertical-align: bottom; }
th.left, td.left { text-align: left; }
td:first-child, td:not(.left) { white-space: nowrap; }
table.wrapped td { white-space: pre-wrap; overflow-wrap: anywhere; vertical-align: top;
                   min-width: 7rem; }
img { max-width: 100%; height: auto; background: #fff; }
li { margin: 0.3rem 0; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A page of `parts`, which are HTML, below its title, which is text."""
    name = escape(title)
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}{chart.STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{name}</h1>\n{body}\n</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def bullets(title: str, texts: Sequence[str]) -> str:
    """A list under a heading."""
    items = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<h2>{escape(title)}</h2>\n<ul>\n{items}\n</ul>"


def picture(caption: str, png: bytes) -> str:
    """A picture under its caption."""
    name, data = escape(caption), base64.b64encode(png).decode()
    return f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,{data}">'
