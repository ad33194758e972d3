"""A page of HTML that needs no other file: it contains its charts, and all text is escaped.

Its colours follow the reader's choice of light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.report import chart
from runtime.core.control_characters import in_markup


def _names(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


STYLE = (
    f"""
:root {{ color-scheme: light dark; {_names(chart.LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_names(chart.DARK)} }} }}
"""
    + """
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
li { margin: 0.3rem 0; }
"""
)


def page(title: str, parts: Sequence[str]) -> str:
    """A page of `parts`, which are HTML, below its title, which is text."""
    name = in_markup(title)
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}{chart.PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{name}</h1>\n{body}\n</body>\n</html>\n"
    )


def paragraph(text: str) -> str:
    return f"<p>{in_markup(text)}</p>"


def bullets(title: str, texts: Sequence[str]) -> str:
    """A list under a heading."""
    items = "\n".join(f"<li>{in_markup(text)}</li>" for text in texts)
    return f"<h2>{in_markup(title)}</h2>\n<ul>\n{items}\n</ul>"
