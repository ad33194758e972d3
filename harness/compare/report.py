"""A comparison's report: as text, as one page of HTML, and the files of both with the plots.

Invariant: the text and the page show the same cells, all drawn from `compare.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compare.plots import draw
from harness.compare.tables import tables
from harness.report.chart import Chart, standalone
from harness.report.page import bullets, page, paragraph
from harness.report.table import Table
from runtime.core.files import write_atomic


def write_report(report: Mapping[str, Any], place: Path) -> None:
    """Write `compare.json`, `compare.txt`, `compare.html` and the plots."""
    pictures = draw(report)
    for name, charts in pictures.items():
        write_atomic(place / f"{name}.svg", standalone(charts))
    write_atomic(place / "compare.txt", (to_text(report) + "\n").encode())
    write_atomic(place / "compare.html", to_html(report, pictures).encode())
    write_atomic(place / "compare.json", (json.dumps(report, allow_nan=False) + "\n").encode())


def to_text(report: Mapping[str, Any]) -> str:
    """The verdict, all tables and notes."""
    parts = [_heading(report), report["verdict"], *(table.text() for table in tables(report))]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in report["notes"])])


def to_html(report: Mapping[str, Any], pictures: Mapping[str, Sequence[Chart]]) -> str:
    """The page; `pictures` are the charts of each."""
    levels, *others = (table.html() for table in tables(report))
    facts = [("setting", "value"), *((key, _shown(value)) for key, value in _facts(report).items())]
    parts = [
        paragraph(_heading(report)),
        paragraph(report["verdict"]),
        levels,
        bullets("Notes", report["notes"]),
        *(chart.html() for charts in pictures.values() for chart in charts),
        *others,
        Table("Settings", facts, left=2).html(),
    ]
    return page(_title(report), parts)


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    *others, last = report["methods"]
    methods = f"{', '.join(others)} and {last}" if others else last
    return f"{methods} on {settings['bundle']}, budget {settings['budget']}"


def _heading(report: Mapping[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    held_out = settings["eval_data"] or f"valid of {settings['data']}"
    rows = f"{settings['batch_size']} row{'s' * (settings['batch_size'] != 1)}"
    length = settings["max_seq_length"]
    cut = f" of up to {length} tokens" if length else ""
    before = report["baseline"]
    return (
        f"{_title(report)}: {settings['data']}, {rows}{cut} a step, held out {held_out}; before "
        f"training loss {before['loss']:.4f}, accuracy {before['accuracy']:.2%}; "
        f"{machine['machine']}, {machine['cores']} cores, MLX {machine['mlx']}"
    )


def _facts(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **report["settings"],
        **report["machine"],
        "ondevice": report["version"],
        "commit": report["commit"],
    }


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
