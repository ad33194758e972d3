"""The results of a comparison as data: everything that it found, for `compare.json`.

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


def result(config: CompareConfig, findings: Mapping[str, Finding]) -> dict[str, Any]:
    """The content of `compare.json`; at least one method has a curve."""
    curves = {
        name: finding.curve
        for name, finding in findings.items()
        if finding.curve and finding.curve.points
    }
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
        "methods": {name: _method(finding) for name, finding in findings.items()},
        "sweep": {
            name: {
                "rounds": sweep_steps(config, name, len(finding.tried)),
                "tried": [asdict(tried) for tried in finding.tried],
                "chosen": finding.chosen,
            }
            for name, finding in findings.items()
            if finding.tried
        },
        "notes": notes(config, findings),
    }


def _settings(config: CompareConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(config).items()
        if key != "output"
    }
    names = {key: settings[key] for key in PATHS if settings[key] is not None}
    return settings | {key: Path(value).name for key, value in names.items()}


def _method(finding: Finding) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "outcome": finding.outcome,
        "reason": finding.reason,
        "trial": None if finding.trial is None else asdict(finding.trial),
        "summary": finding.summary,
        "curve": None,
    }
    if finding.curve is not None and finding.curve.points:
        steps = finding.curve.columns["step"]
        facts |= {
            "steps": len(steps),
            "stopped": None if finding.summary is None else finding.summary["stopped"],
            "training_s": sum(finding.curve.columns["seconds"]),
            "best": asdict(finding.curve.best),
            "last": asdict(finding.curve.points[-1]),
            "curve": finding.curve.to_json(),
        }
    return facts
