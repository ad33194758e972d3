"""A comparison's tables: what each level cost, the methods, and their sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.table import Table


def tables(report: Mapping[str, Any]) -> list[Table]:
    """The cost of each level first, then the methods, then their sweeps."""
    return [_levels(report), _methods(report), *_sweeps(report)]


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
    options = _options([one["trial"] for one in report["methods"].values()])
    rows = [
        (
            *("method", *map(_words, options), "ended by", "steps", "training s"),
            *("best loss", "at step", "last loss", "accuracy", "rows right", "peak MB"),
        )
    ]
    for name, one in report["methods"].items():
        first = (name, *_values(one["trial"], options), one.get("stopped") or one["outcome"])
        if one["curve"] is None:
            rows.append((*first, *[""] * 8))
            continue
        best, last = one["best"], one["last"]
        rows.append(
            (
                *(*first, f"{one['steps']:,}", f"{one['training_s']:,.1f}"),
                *(f"{best['loss']:.4f}", f"{best['step']:,}", f"{last['loss']:.4f}"),
                *(f"{last['accuracy']:.2%}", f"{last['exact']:.1%}"),
                f"{one['curve']['peak_bytes'] / 1e6:.1f}",
            )
        )
    title = "Methods, with accuracy and rows right at the last evaluation"
    return Table(title, rows, left=2 + len(options))


def _sweeps(report: Mapping[str, Any]) -> list[Table]:
    found = []
    for name, sweep in report["sweep"].items():
        options = _options([one["trial"] for one in sweep["tried"]])
        rows = [(*map(_words, options), "steps", "outcome", "held-out loss", "training s", "")]
        for index, one in enumerate(sweep["tried"]):
            rows.append(
                (
                    *_values(one["trial"], options),
                    f"{one['steps']:,}",
                    one["outcome"] + (f": {one['reason']}" if one["reason"] else ""),
                    "" if one["loss"] is None else f"{one['loss']:.4f}",
                    "" if one["training_s"] is None else f"{one['training_s']:,.1f}",
                    "chosen" if index == sweep["chosen"] else "",
                )
            )
        title = f"Sweep of {name}: the better half went on each time"
        found.append(Table(title, rows, left=1 + len(options)))
    return found


def _options(trials: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """The training options that any of the trials has a value for."""
    return list(dict.fromkeys(option for one in trials if one for option in one["values"]))


def _words(option: str) -> str:
    return option.replace("_", " ")


def _values(trial: Mapping[str, Any] | None, options: Sequence[str]) -> tuple[str, ...]:
    """A cell for each option, empty where the trial has no value."""
    values = trial["values"] if trial else {}
    return tuple(f"{values[option]:g}" if option in values else "" for option in options)
