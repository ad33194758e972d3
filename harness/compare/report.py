"""A comparison's report: as text, as one page of HTML, and the files of both with the plots.

Invariant: the text and the page show the same cells, all drawn from `compare.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.compare.plots import draw
from harness.report.chart import Chart, standalone
from harness.report.page_shell import bullets, page, paragraph
from harness.report.runs_page import other_losses
from harness.report.table import Table
from runtime.core.files import write_atomic
from runtime.core.units import counted


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
    rows = counted(settings["batch_size"], "row")
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


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The cost of each level first, then the methods and other data, then their sweeps."""
    others = [
        (name, method["summary"].get("also_eval", {}))
        for name, method in report["methods"].items()
        if method["summary"]
    ]
    return [_levels(report), _methods(report), *other_losses(others), *_sweeps(report)]


def _levels(report: Mapping[str, Any]) -> Table:
    rows: list[tuple[str, ...]] = [
        ("loss", "level", "method", "steps", "forward passes", "training s", "peak MB")
    ]
    for level in report["levels"]:
        first = (f"{level['loss']:.4f}", level["meaning"])
        for name in report["methods"]:
            point = level["reached"].get(name)
            cost = (
                ("not reached", "", "", "")
                if point is None
                else (
                    f"{point['step']:,}",
                    f"{point['forward_passes']:,}",
                    f"{point['seconds']:,.1f}",
                    f"{point['peak_bytes'] / 1e6:.1f}",
                )
            )
            rows.append((*first, name, *cost))
            first = ("", "")
    if len(rows) == 1:
        rows.append(("none", "no method fell below the loss before training", *[""] * 5))
    return Table("Cost until the held-out loss first reached a level", rows, left=3)


def _methods(report: Mapping[str, Any]) -> Table:
    options = _options([method["trial"] for method in report["methods"].values()])
    rows = [
        (
            *("method", *map(_words, options), "ended by", "steps", "training s"),
            *("best loss", "at step", "last loss", "accuracy", "rows right", "peak MB"),
        )
    ]
    for name, method in report["methods"].items():
        first = (
            name,
            *_values(method["trial"], options),
            method.get("stopped") or method["outcome"],
        )
        if method["curve"] is None:
            rows.append((*first, *[""] * 8))
            continue
        best, last = method["best"], method["last"]
        rows.append(
            (
                *(*first, f"{method['steps']:,}", f"{method['training_s']:,.1f}"),
                *(f"{best['loss']:.4f}", f"{best['step']:,}", f"{last['loss']:.4f}"),
                *(f"{last['accuracy']:.2%}", f"{last['exact']:.1%}"),
                f"{method['curve']['peak_bytes'] / 1e6:.1f}",
            )
        )
    title = "Methods, with accuracy and rows right at the last evaluation"
    return Table(title, rows, left=2 + len(options))


def _sweeps(report: Mapping[str, Any]) -> list[Table]:
    tables = []
    for name, sweep in report["sweep"].items():
        options = _options([tried["trial"] for tried in sweep["tried"]])
        rows = [(*map(_words, options), "steps", "outcome", "held-out loss", "training s", "")]
        for index, tried in enumerate(sweep["tried"]):
            rows.append(
                (
                    *_values(tried["trial"], options),
                    f"{tried['steps']:,}",
                    tried["outcome"] + (f": {tried['reason']}" if tried["reason"] else ""),
                    "" if tried["loss"] is None else f"{tried['loss']:.4f}",
                    "" if tried["training_s"] is None else f"{tried['training_s']:,.1f}",
                    "chosen" if index == sweep["chosen"] else "",
                )
            )
        title = f"Sweep of {name}: the better half went on each time"
        tables.append(Table(title, rows, left=1 + len(options)))
    return tables


def _options(trials: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """The training options that any of the trials has a value for."""
    return list(dict.fromkeys(option for trial in trials if trial for option in trial["values"]))


def _words(option: str) -> str:
    return option.replace("_", " ")


def _values(trial: Mapping[str, Any] | None, options: Sequence[str]) -> tuple[str, ...]:
    """A cell for each option, empty where the trial has no value."""
    values = trial["values"] if trial else {}
    return tuple(f"{values[option]:g}" if option in values else "" for option in options)
