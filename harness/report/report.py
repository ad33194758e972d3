"""A comparison's tables as text, and as one page of HTML that needs nothing beside itself.

Invariant: both show the same cells, all drawn from `compare.json`; every text on the page is
escaped, every picture is inside it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from harness.report.plots import draw
from ondevice.files import write_atomic

STYLE = """
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
       color: #1b1b1b; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { padding: 0.25rem 0.9rem 0.25rem 0; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 1px solid #888; font-weight: 600; vertical-align: bottom; }
th.left, td.left { text-align: left; }
img { max-width: 100%; height: auto; }
li { margin: 0.3rem 0; }
"""


@dataclass(frozen=True)
class Table:
    """Cells under a heading; the first `left` columns are words, the others numbers."""

    title: str
    rows: Sequence[tuple[str, ...]]
    left: int

    def text(self) -> str:
        """Aligned columns."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if index < self.left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in self.rows
        ]
        return "\n".join([f"{self.title}:", *lines])

    def html(self) -> str:
        """A <table> under its heading."""

        def line(row: tuple[str, ...], tag: str) -> str:
            words = f'{tag} class="left"'
            cells = [
                f"<{words if index < self.left else tag}>{escape(cell)}</{tag}>"
                for index, cell in enumerate(row)
            ]
            return f"<tr>{''.join(cells)}</tr>"

        head, *body = self.rows
        return (
            f"<h2>{escape(self.title)}</h2>\n"
            f'<div class="wide"><table>\n<thead>{line(head, "th")}</thead>\n<tbody>\n'
            + "\n".join(line(row, "td") for row in body)
            + "\n</tbody></table></div>"
        )


def write_report(report: Mapping[str, Any], place: Path) -> None:
    """Write `compare.json`, `compare.txt`, `compare.html` and the plots."""
    pictures = draw(report)
    for name, (_, png) in pictures.items():
        write_atomic(place / name, png)
    write_atomic(place / "compare.txt", (to_text(report) + "\n").encode())
    write_atomic(place / "compare.html", to_html(report, pictures).encode())
    write_atomic(place / "compare.json", (json.dumps(report, allow_nan=False) + "\n").encode())


def to_text(report: Mapping[str, Any]) -> str:
    """The verdict, all tables and notes."""
    parts = [_heading(report), report["verdict"], *(table.text() for table in tables(report))]
    return "\n\n".join([*parts, "\n".join(f"- {note}" for note in report["notes"])])


def to_html(report: Mapping[str, Any], pictures: Mapping[str, tuple[str, bytes]]) -> str:
    """The page; `pictures` are captions and PNG bytes by file name."""
    quality, *others = (table.html() for table in tables(report))
    figures = [
        f"<h2>{escape(caption)}</h2>\n"
        f'<img alt="{escape(caption)}" src="data:image/png;base64,'
        f'{base64.b64encode(png).decode()}">'
        for caption, png in pictures.values()
    ]
    notes = "\n".join(f"<li>{escape(note)}</li>" for note in report["notes"])
    settings = Table(
        "Settings",
        [("setting", "value"), *((key, _shown(value)) for key, value in _facts(report).items())],
        left=2,
    )
    title = escape(_title(report))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>{escape(_heading(report))}</p>\n"
        f"<p><strong>{escape(report['verdict'])}</strong></p>\n"
        + "\n".join([quality, f"<h2>To be read with it</h2>\n<ul>\n{notes}\n</ul>"])
        + "\n"
        + "\n".join([*figures, *others, settings.html()])
        + "\n</body>\n</html>\n"
    )


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Steps to quality first, then the methods, then their sweeps."""
    return [_levels(report), _methods(report), *_sweeps(report)]


def _title(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    methods = " and ".join(report["methods"])
    return f"{methods} on {settings['bundle']}, budget {settings['budget']}"


def _heading(report: Mapping[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    held_out = settings["eval_data"] or f"valid of {settings['data']}"
    rows = f"{settings['batch_size']} row{'s' * (settings['batch_size'] != 1)}"
    return (
        f"{_title(report)}: {settings['data']}, {rows} of up to {settings['max_seq_length']} "
        f"tokens a step, held out {held_out}; before training loss "
        f"{report['baseline']['loss']:.4f}, accuracy {report['baseline']['accuracy']:.2%}; "
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


def _levels(report: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = [
        ("loss", "level", "method", "steps", "forward passes", "training s", "peak MB")
    ]
    for level in report["levels"]:
        first = (f"{level['loss']:.4f}", level["meaning"])
        for name in report["methods"]:
            point = level["reached"].get(name)
            spent = (
                ("not reached", "", "", "")
                if point is None
                else (
                    f"{point['step']:,}",
                    f"{point['forward_passes']:,}",
                    f"{point['seconds']:,.1f}",
                    f"{point['peak_bytes'] / 1e6:.1f}",
                )
            )
            rows.append((*first, name, *spent))
            first = ("", "")
    if len(rows) == 1:
        rows.append(("none", "no method fell below the loss before training", *[""] * 5))
    return Table("Spent until the held-out loss was first at a level or below", rows, left=3)


def _methods(report: Mapping[str, Any]) -> Table:
    rows = [
        (
            *("method", "learning rate", "epsilon", "ended by", "steps", "training s"),
            *("best loss", "at step", "last loss", "accuracy", "rows right", "peak MB"),
        )
    ]
    for name, one in report["methods"].items():
        trial = one["trial"]
        rate = "" if trial is None else f"{trial['learning_rate']:g}"
        epsilon = "" if trial is None or trial["epsilon"] is None else f"{trial['epsilon']:g}"
        ended = one.get("stopped") or one["outcome"]
        if one["curve"] is None:
            rows.append((name, rate, epsilon, ended, *[""] * 8))
            continue
        best, last = one["best"], one["last"]
        rows.append(
            (
                *(name, rate, epsilon, ended, f"{one['steps']:,}", f"{one['training_s']:,.1f}"),
                *(f"{best['loss']:.4f}", f"{best['step']:,}", f"{last['loss']:.4f}"),
                *(f"{last['accuracy']:.2%}", f"{last['exact']:.1%}"),
                f"{one['curve']['peak_bytes'] / 1e6:.1f}",
            )
        )
    return Table("Methods, with accuracy and rows right at the last evaluation", rows, left=4)


def _sweeps(report: Mapping[str, Any]) -> list[Table]:
    found = []
    for name, sweep in report["sweep"].items():
        rows = [("learning rate", "epsilon", "outcome", "held-out loss", "training s", "")]
        for index, one in enumerate(sweep["tried"]):
            epsilon = one["trial"]["epsilon"]
            rows.append(
                (
                    f"{one['trial']['learning_rate']:g}",
                    "" if epsilon is None else f"{epsilon:g}",
                    one["outcome"] + (f": {one['reason']}" if one["reason"] else ""),
                    "" if one["loss"] is None else f"{one['loss']:.4f}",
                    "" if one["training_s"] is None else f"{one['training_s']:,.1f}",
                    "chosen" if index == sweep["chosen"] else "",
                )
            )
        found.append(Table(f"Sweep of {name}, {sweep['steps']:,} steps each", rows, left=3))
    return found
