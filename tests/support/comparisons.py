"""Comparisons whose training runs and learning curves are made up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.config.compare import CompareConfig
from harness.report.curve import Curve, make_curve
from runtime.core.errors import DivergedError

Ends = Callable[[str, float], Any]  # of (method, learning rate): the last loss, or an error


def entry(step: int, seconds: float = 2.0, passes: int = 1, peak: int = 100) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 3.0,
        "learning_rate": 1e-3,
        "scored_tokens": 8,
        "tokens": 8,
        "seconds": seconds,
        "forward_passes": passes,
        "footprint_bytes": peak - 10,
        "peak_footprint_bytes": peak,
        "peak_rss_bytes": peak,
    }


def evaluation(loss: float) -> dict[str, Any]:
    measured = {"loss": loss, "perplexity": math.exp(loss), "accuracy": 0.5 - loss / 20}
    return {**measured, "exact": 0.0, "scored_tokens": 8, "rows": 1}


def curve_of(losses: Mapping[str, float], steps: int, **more: Any) -> Curve:
    found = {when: evaluation(loss) for when, loss in losses.items()}
    return make_curve([entry(step + 1, **more) for step in range(steps)], found)


def settings(tmp_path: Path, **more: Any) -> CompareConfig:
    given = {
        "bundle": str(tmp_path / "<b>undle"),
        "data": "random:1",
        "eval_data": "random:2",
        "output": str(tmp_path / "out"),
        "steps": "4",
        "eval_every": "2",
        "budget": "300MB",
    }
    return CompareConfig(**(given | more))


class Runs:
    """Stands in for `measure`: writes the files that a run leaves."""

    def __init__(self, ends: Ends) -> None:
        self.ends, self.made = ends, list[Path]()

    def __call__(self, settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        steps = settings["steps"]
        if steps > self._steps_done(run):
            self.made.append(run)
            run.mkdir(parents=True, exist_ok=True)
            (run / "config.toml").touch()
            end = self.ends(settings["method"], settings["learning_rate"])
            if settings.get("stop_loss", 0.0) >= 5.0:
                steps, end = 0, 5.0
            lines = [entry(step + 1) for step in range(steps)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
            last = 5.0 if isinstance(end, Exception) else end
            found = {"before": 5.0, "2": (5.0 + last) / 2, "after": last}  # 2: dropped of no steps
            if done := self._steps_done(run):  # it goes on
                found[str(done)] = last
            if isinstance(end, Exception):
                del found["after"]
            results = {when: evaluation(loss) for when, loss in found.items()}
            (run / "evaluations.json").write_text(json.dumps(results))
            if isinstance(end, Exception):
                raise end
            (run / "summary.json").write_text(json.dumps({"stopped": "steps"}))
            (run / "steps").write_text(str(settings["steps"]))
        found_summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        return found_summary

    @staticmethod
    def _steps_done(run: Path) -> int:
        return int((run / "steps").read_text()) if (run / "steps").exists() else 0


def by_rate(method: str, rate: float) -> Any:
    if method == "mezo":
        return 4.8 - rate
    return DivergedError("the loss of step 2 is nan") if rate > 5e-4 else 4.0 - rate
