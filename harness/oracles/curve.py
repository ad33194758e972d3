"""A run as one JSON file: settings, losses, evaluations, footprint, and the dense run beside it.

`python -m harness.oracles.curve RUN -o FILE` reads RUN/metrics.jsonl, summary.json and, where there is
one, dense.json.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

LOCAL = ("bundle", "data", "output", "eval_data")  # paths of one machine


def curve(run: Path) -> dict[str, Any]:
    """The figures of a finished run."""
    config = tomllib.loads((run / "config.toml").read_text())
    settings = {key: value for key, value in config.items() if key not in LOCAL}
    names = {key: Path(config[key]).name for key in ("bundle", "data") if key in config}
    flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings.items())
    summary = json.loads((run / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {
        "command": f"ondevice train {names['bundle']} --data {names['data']} {flags}",
        "summary": summary,
        "losses": [entry["loss"] for entry in metrics],
    }
    dense = run / "dense.json"
    if dense.exists():
        other = json.loads(dense.read_text())
        differences = [abs(a - b) for a, b in zip(found["losses"], other["losses"], strict=True)]
        found["dense"] = {
            "command": "python -m harness.oracles.dense RUN",
            **other,
            "largest_step_difference": max(differences),
            "after_difference": abs(summary["eval"]["after"]["loss"] - other["after"]["loss"]),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    result = curve(arguments.run)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result) + "\n")
    shown = {
        "before": result["summary"]["eval"]["before"],
        "after": result["summary"]["eval"]["after"],
    }
    print(json.dumps({**shown, "dense": result.get("dense", {}).get("after")}))


if __name__ == "__main__":
    main()
