"""Table 1 of the MeBP paper on one model: function calls before training, after MeZO, after MeBP.

`run` trains on the non-live questions and asks live ones, as `prepare` has written them, by the
command line alone. A stage whose result is in the output folder is not run again.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.measure.command import ondevice
from harness.measure.provenance import machine, provenance
from harness.report.table import Table
from runtime.core.documents import from_json
from runtime.core.errors import DataError
from runtime.core.files import write_atomic


@dataclass(frozen=True)
class Training:
    """A method, its settings here, and the steps and the live score that the paper has for it."""

    method: str
    settings: dict[str, Any]
    paper_steps: int
    paper_live: float


BEFORE = "before"
PAPER_BEFORE = 0.1192
"""The paper's live score of gemma-3-1b-it, trained on 2,672 samples of ToolACE."""

SHARED = {"budget": "500MB", "pack": True, "save-every": 50}
TRAININGS = (
    Training("mezo", {"steps": 300, "learning-rate": 3e-5}, 100_000, 0.1510),
    Training(
        "mebp",
        {"steps": 150, "learning-rate": 5e-4, "lr-schedule": "linear", "warmup-steps": 10},
        1_000,
        0.3301,
    ),
)
MAX_TOKENS = 96  # of an answer
KEPT = (  # of a training's summary
    *("steps", "seconds", "step_s_median", "forward_passes", "final_train_loss"),
    *("budget_bytes", "predicted_peak_bytes", "peak_footprint_bytes", "trainable_parameters"),
    *("lora", "packing"),
)


@dataclass(frozen=True)
class Stages:
    """The bundle, the rows, the folder of results, and other things that all stages share."""

    bundle: str
    data: Path
    output: Path
    length: int
    questions: int
    seed: int

    def known(self, name: str, make: Callable[[], Any]) -> Any:
        """A stage's result, from its file where there is one."""
        file = self.output / f"{name}.json"
        if not file.exists():
            result = make()
            write_atomic(file, (json.dumps(result, indent=1) + "\n").encode())
        return from_json(file.read_bytes())

    def trained(self, training: Training) -> dict[str, Any]:
        """Train by a method; its settings, and figures from its summary."""
        method = training.method
        settings = {**SHARED, "method": method, **training.settings}
        settings |= {"max-seq-length": self.length, "seed": self.seed}

        def train() -> dict[str, Any]:
            run = self.output / method
            shutil.rmtree(run, ignore_errors=True)
            options = [_option(name, value) for name, value in settings.items()]
            rows = self.data / "train.jsonl"
            text, cpu_s = _timed(
                "train", self.bundle, f"--data={rows}", f"--output={run}", "--json", *options
            )
            summary = json.loads(text)
            return {
                **provenance(), "settings": settings, "cpu_s": cpu_s,
                **{name: summary[name] for name in KEPT if name in summary},
            }  # fmt: skip

        result: dict[str, Any] = self.known(f"{method}.train", train)
        return result

    def asked(self, name: str) -> dict[str, Any]:
        """Ask the questions, and measure the loss of the right answers, after a stage."""
        adapter = [] if name == BEFORE else [f"--adapter={self.output / name}"]
        shared = [f"--data={self.data / 'valid.jsonl'}", f"--eval-rows={self.questions}", "--json"]

        def calls() -> dict[str, Any]:
            answers = self.output / f"{name}.answers.jsonl"
            text, cpu_s = _timed(
                "eval", self.bundle, *shared, *adapter, "--task=bfcl",
                f"--max-tokens={MAX_TOKENS}", f"--max-seq-length={self.length}",
                f"--answers={answers}",
            )  # fmt: skip
            return {**provenance(), **json.loads(text), "cpu_s": cpu_s}

        def loss() -> dict[str, Any]:
            text, _ = _timed("eval", self.bundle, *shared, *adapter)
            evaluated = json.loads(text)
            return {
                key: evaluated[key]
                for key in ("loss", "accuracy", "exact", "scored_tokens", "rows")
            }

        return {
            "calls": self.known(f"{name}.calls", calls),
            "right_answers": self.known(f"{name}.loss", loss),
        }


def run(stages: Stages) -> dict[str, Any]:
    """Every stage; the report, which `bfcl.json` holds.

    Raises:
        DataError: the data folder is not one that `prepare` wrote.
    """
    rows = stages.data / "rows.json"
    if not rows.is_file():
        raise DataError(f"{stages.data} has no rows.json; let prepare write the folder")
    stages.output.mkdir(parents=True, exist_ok=True)
    methods = [training.method for training in TRAININGS]
    report: dict[str, Any] = {
        **provenance(),
        "machine": machine(),
        "bundle": Path(stages.bundle).name,
        "max_seq_length": stages.length,
        "seed": stages.seed,
        "rows": from_json(rows.read_bytes()),
        "paper": {
            BEFORE: PAPER_BEFORE,
            **{
                training.method: {"steps": training.paper_steps, "live": training.paper_live}
                for training in TRAININGS
            },
        },
        "training": {training.method: stages.trained(training) for training in TRAININGS},
        "stages": {name: stages.asked(name) for name in (BEFORE, *methods)},
    }
    write_atomic(stages.output / "bfcl.json", (json.dumps(report, indent=1) + "\n").encode())
    return report


def describe(report: dict[str, Any]) -> str:
    """The table: a column for each stage, and the paper's figures in its last row."""
    stages, training = report["stages"], report["training"]
    calls = {name: stage["calls"] for name, stage in stages.items()}
    loss = {name: stage["right_answers"] for name, stage in stages.items()}

    def share(counts: dict[str, Any] | None) -> str:
        if counts is None:
            return ""
        return f"{counts['right']} of {counts['questions']} ({counts['accuracy']:.1%})"

    categories = list(next(iter(calls.values()))["categories"])
    lines: list[Sequence[str]] = [
        ["right", *(_title(name, training) for name in stages)],
        ["live, all", *(share(counts["live"]) for counts in calls.values())],
        ["standard error", *(f"{_error(counts['live']):.1%}" for counts in calls.values())],
    ]
    lines += [
        [name, *(share(counts["categories"].get(name)) for counts in calls.values())]
        for name in categories
    ]
    lines += [
        ["malformed", *(str(counts["malformed"]) for counts in calls.values())],
        ["cut", *(str(counts["cut"]) for counts in calls.values())],
        ["loss of a right answer", *(f"{evaluated['loss']:.3f}" for evaluated in loss.values())],
        ["exactly that answer", *(f"{evaluated['exact']:.1%}" for evaluated in loss.values())],
        ["training s (CPU s)", "", *map(_seconds, training.values())],
    ]
    paper = (report["paper"][BEFORE], *(report["paper"][name]["live"] for name in training))
    lines.append(["the paper's 1B model", *(f"{value:.2%}" for value in paper)])
    return Table("function calls", [tuple(line) for line in lines], 1).text()


def _title(name: str, training: dict[str, Any]) -> str:
    return name if name == BEFORE else f"{name}, {training[name]['steps']} steps"


def _seconds(stage: dict[str, Any]) -> str:
    return f"{stage['seconds']:.0f} ({stage['cpu_s']:.0f})"


def _error(counts: dict[str, Any]) -> float:
    """The standard error of a share, as of independent questions."""
    return math.sqrt(counts["accuracy"] * (1 - counts["accuracy"]) / counts["questions"])


def _option(name: str, value: object) -> str:
    return f"--{name}" if value is True else f"--{name}={value}"


def _timed(*arguments: str) -> tuple[str, float]:
    """A command's output, and the CPU seconds that it and its own processes took."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    start = spent()
    return ondevice(*arguments), spent() - start
