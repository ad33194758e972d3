"""The content of `compare.json`: everything that a comparison found, as data.

Invariant: every trial is in it, also those that diverged or did not fit; no path of this machine
is. Tables, plots and the page are drawn from it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.compare.lengths import sweep_steps
from harness.compare.notes import notes
from harness.compare.trials import Finding
from harness.compare.verdict import verdict
from harness.config.compare import CompareConfig
from harness.measure.provenance import provenance
from harness.measure.training import PATHS
from harness.report.curve import levels
from runtime.machine.backend import describe


def result(config: CompareConfig, found: Mapping[str, Finding]) -> dict[str, Any]:
    """What `compare.json` holds; at least one method has a curve."""
    curves = {name: one.curve for name, one in found.items() if one.curve and one.curve.points}
    baseline = next(iter(curves.values())).points[0]
    reached = [
        {
            "loss": level.loss,
            "meaning": level.meaning,
            "reached": {
                name: asdict(point) if (point := curve.reached(level.loss)) else None
                for name, curve in curves.items()
            },
        }
        for level in levels(baseline.loss, curves, config.target_loss)
    ]
    return {
        "settings": _settings(config),
        **provenance(),
        "machine": describe(),
        "budget_bytes": config.budget_bytes,
        "baseline": {"loss": baseline.loss, "accuracy": baseline.accuracy},
        "verdict": verdict(reached, config.judged_by),
        "levels": reached,
        "methods": {name: _method(one) for name, one in found.items()},
        "sweep": {
            name: {
                "rounds": sweep_steps(config, name, len(one.tried)),
                "tried": [asdict(tried) for tried in one.tried],
                "chosen": one.chosen,
            }
            for name, one in found.items()
            if one.tried
        },
        "notes": notes(config, found),
    }


def _settings(config: CompareConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(config).items()
        if key != "output"
    }
    names = {key: settings[key] for key in PATHS if settings[key] is not None}
    return settings | {key: Path(value).name for key, value in names.items()}


def _method(one: Finding) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "outcome": one.outcome,
        "reason": one.reason,
        "trial": None if one.trial is None else asdict(one.trial),
        "summary": one.summary,
        "profile": one.profile,
        "curve": None,
    }
    if one.curve is not None and one.curve.points:
        steps = one.curve.columns["step"]
        facts |= {
            "steps": len(steps),
            "stopped": None if one.summary is None else one.summary["stopped"],
            "training_s": sum(one.curve.columns["seconds"]),
            "best": asdict(one.curve.best),
            "last": asdict(one.curve.points[-1]),
            "curve": one.curve.to_json(),
        }
    return facts
