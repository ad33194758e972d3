"""`ondevice compare`: which method reaches the wanted quality first, and its cost.

Each method runs in fresh processes, one at a time, on the same rows in the same order, from the
same adapters, under the same budget, after a sweep over values of its options. Invariant: the
result depends on the run folders alone, so an interrupted comparison continues where it stopped,
and a finished one is only reported again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.compare.folder import RUNS, SWEEP, absolute, has_runs, open_folder, remove
from harness.compare.lengths import (
    UNBOUNDED_STEPS,
    evaluated_every,
    first_passes,
    passes_of_row,
    passes_of_step,
    step_limit,
    sweep_steps,
)
from harness.compare.report import write_report
from harness.compare.result import result
from harness.compare.trials import (
    Finding,
    Trial,
    Tried,
    choose,
    grid,
    ranked,
    training_settings,
    without,
)
from harness.config.compare import CompareConfig
from harness.measure.training import measure_training
from harness.report.curve import read_curve
from runtime.bundle.store import open_bundle
from runtime.config.train import NO_DATA, TrainConfig
from runtime.core.errors import (
    BudgetError,
    DivergedError,
    InterruptedRunError,
    OnDeviceError,
    UsageError,
)
from runtime.core.files import write_atomic
from runtime.core.notes import Note
from runtime.core.typed import read_typed
from runtime.data.hub import hub_dataset
from runtime.data.report import DataReport
from runtime.data.source import split_file
from runtime.run.budget import training
from runtime.run.lora import to_train

MOST_RISE = 1.1  # times the loss before training: a run that is above it is stopped
ASIDE, REASON, DIVERGED = ".aside", "aside.json", ".diverged.json"
Measure = Callable[[Mapping[str, object], Path], dict[str, Any]]


class _Aside(msgspec.Struct):
    """The content of aside.json: how a run ended that was set aside, and why."""

    outcome: str
    reason: str


class _Diverged(msgspec.Struct):
    """Of a run that diverged: why, and how many steps were wanted of it."""

    reason: str
    steps: int


@dataclass(frozen=True)
class Comparison:
    """A comparison in its directory."""

    config: CompareConfig
    folder: Path
    note: Note
    measure: Measure

    def run(self) -> dict[str, Any]:
        """Run every part that is not finished yet, and write the results; returns `compare.json`'s.

        Raises:
            InterruptedRunError: a signal arrived; the same command continues.
            BudgetError, DivergedError: no method could run.
        """
        findings = {method: self._method(method) for method in self.config.method_names}
        if not any(finding.curve and finding.curve.points for finding in findings.values()):
            reasons = "; ".join(f"{name}: {finding.reason}" for name, finding in findings.items())
            over = any(finding.outcome == "over budget" for finding in findings.values())
            raise (BudgetError if over else DivergedError)(f"no method could run: {reasons}")
        report = result(self.config, findings)
        write_report(report, self.folder)
        return report

    def _method(self, method: str) -> Finding:
        """Sweep, then run the best trial; where its run diverges, set it aside for the next."""
        trials = grid(self.config, method)
        if len(trials) == 1:
            return self._run(trials[0], (), None)
        tried = self._sweep(method, trials)
        while (best := choose(tried)) is not None:
            aside = self.folder / RUNS / f"{trials[best].name}{ASIDE}"
            if not aside.exists():
                finding = self._run(trials[best], tried, best)
                others = choose(without(tried, best)) is not None
                if not (others and self._set_aside(finding, aside)):
                    return finding
            known = read_typed(aside / REASON, _Aside)
            tried = without(tried, best, known.outcome, known.reason)
        last = tried[-1]
        return Finding(None, tried, None, last.outcome, last.reason, None, None)

    def _set_aside(self, finding: Finding, aside: Path) -> bool:
        """Rename a run that diverged or whose loss rose; False where it did neither."""
        assert finding.trial is not None
        run = self.folder / RUNS / finding.trial.method
        rose = finding.summary is not None and finding.summary["stopped"] == "rise"
        if not (rose or finding.outcome == "diverged") or not run.exists():
            return False
        reason = f"in its run: {finding.reason}"
        if rose and finding.curve and finding.curve.points:
            first, last = finding.curve.points[0], finding.curve.points[-1]
            reason = (
                f"in its run the held-out loss had risen from {first.loss:.4f} to {last.loss:.4f} "
                f"at step {last.step:,}"
            )
        kept = _Aside("rose" if rose else "diverged", reason)
        write_atomic(run / REASON, msgspec.json.encode(kept))
        run.with_name(f"{run.name}{DIVERGED}").unlink(missing_ok=True)
        run.rename(aside)
        self.note(f"{finding.trial.method}: {finding.trial}: {reason}; taking the next best")
        return True

    def _run(self, trial: Trial, tried: tuple[Tried, ...], chosen: int | None) -> Finding:
        method = trial.method
        steps = step_limit(self.config, method)
        self.note(f"{method}: {trial}, {_ending(self.config, steps)}")
        settings = {
            **training_settings(self.config, trial),
            "steps": steps,
            "eval_every": evaluated_every(self.config, method),
            "eval_rows": self.config.eval_rows,
            "stop_seconds": self.config.max_seconds,
            "stop_loss": self.config.target_loss,
            "stop_rise": MOST_RISE,
        }
        run = self.folder / RUNS / method
        outcome, reason, summary = self._attempt(f"the run of {method}", settings, run)
        evaluated = (run / "evaluations.json").exists()
        before = first_passes(self.config, method, run)
        curve = read_curve(run, passes_of_row(method), before) if evaluated else None
        return Finding(trial, tried, chosen, outcome, reason, curve, summary)

    def _sweep(self, method: str, trials: Sequence[Trial]) -> tuple[Tried, ...]:
        """Try all, go on with the better half for twice as many steps, until one is left."""
        tried: list[Tried] = []
        left = list(range(len(trials)))
        for steps in sweep_steps(self.config, method, len(trials)):
            for number, index in enumerate(left, start=1):
                stage = f"sweep {number} of {len(left)} of {method}"
                self.note(f"{stage}: {trials[index]}, {steps:,} steps")
                attempt = self._try(stage, trials[index], steps)
                tried[index:] = [attempt, *tried[index + 1 :]]
                if attempt.outcome == "over budget":
                    return tuple(tried)  # every trial has the same plan, so none would fit
            best = ranked(tried, left)
            left = sorted(best[: (len(left) + 1) // 2])
            if len(left) < 2:
                break
        return tuple(tried)

    def _try(self, stage: str, trial: Trial, steps: int) -> Tried:
        settings = {
            **training_settings(self.config, trial),
            "also_evaluate": [NO_DATA],
            "steps": steps,
            "eval_rows": self.config.sweep_rows or self.config.eval_rows,
        }
        run = self.folder / SWEEP / trial.name
        outcome, reason, _ = self._attempt(stage, settings, run)
        return _tried(trial, outcome, reason, run, steps)

    def _attempt(
        self, stage: str, settings: Mapping[str, Any], run: Path
    ) -> tuple[str, str, dict[str, Any] | None]:
        """How a run ended, why where it did not finish, and its summary where it did."""
        diverged = run.with_name(f"{run.name}{DIVERGED}")
        if diverged.exists():
            known = read_typed(diverged, _Diverged)
            if settings["steps"] >= known.steps:
                return "diverged", known.reason, None
            return "finished", "", None  # it diverged later, when it went on
        try:
            return "finished", "", self.measure(settings, run)
        except DivergedError as problem:
            reason = str(problem).replace(str(run), run.name)
            write_atomic(diverged, msgspec.json.encode(_Diverged(reason, settings["steps"])))
            return "diverged", reason, None
        except BudgetError as problem:
            return "over budget", str(problem).replace(str(run), run.name), None
        except InterruptedRunError:
            raise InterruptedRunError(
                f"interrupted in {stage}; what is done is kept in {self.folder}: give the same "
                "command again to continue"
            ) from None


def compare(
    config: CompareConfig, note: Note, measure: Measure = measure_training
) -> dict[str, Any]:
    """Run or continue a comparison; returns the content of `compare.json`.

    `measure` trains with the settings and in the folder that it is given; tests replace it.

    Raises:
        UsageError: there are no held-out rows, or the directory holds something else.
        OnDeviceError: see `Comparison.run`; a comparison refused at its start leaves nothing.
    """
    fixed = absolute(config)
    _check_held_out(fixed)
    folder = Path(fixed.output)
    existed = folder.exists()
    open_folder(folder, fixed)
    try:
        return Comparison(fixed, folder, note, _showing_lengths(fixed, note, measure)).run()
    except OnDeviceError:
        if not has_runs(folder):
            remove(folder, existed)
        raise


def _showing_lengths(config: CompareConfig, note: Note, measure: Measure) -> Measure:
    """As `measure`, and the lengths of the rows are shown once: all trials have the same."""
    shown: list[str] = []

    def measured(settings: Mapping[str, object], run: Path) -> dict[str, Any]:
        summary = measure(settings, run)
        reports = {} if shown else summary.get("data", {})
        for name, facts in reports.items():
            report = msgspec.convert(facts, DataReport, strict=False)
            shown.append(report.histogram(open_bundle(config.bundle).manifest.buckets))
            note(f"{name}, rows by their tokens to predict:\n{shown[-1]}")
        return summary

    return measured


def check_methods(config: CompareConfig) -> None:
    """Check each method's options against the bundle, and the forward passes of one step.

    Raises:
        UsageError: a method cannot be trained like this, or has no step in so few passes.
        BundleError: there is no bundle, or it is damaged.
    """
    bundle = open_bundle(config.bundle)
    for method in config.method_names:
        settings = training_settings(config, grid(config, method)[0])
        trained, own = to_train(TrainConfig(**settings), bundle)
        training(trained, own.manifest)
        before = first_passes(config, method)
        passes = before + passes_of_step(config, method)
        if 0 < config.max_forward_passes < passes:
            raise UsageError(
                f"max_forward_passes {config.max_forward_passes} < {passes}, those of one step of "
                f"{method}{' and those before it' if before else ''}; give more, or leave the "
                "method out"
            )


def _tried(trial: Trial, outcome: str, reason: str, run: Path, steps: int) -> Tried:
    """The state of a trial after so many steps; its run may have gone further since."""
    if outcome != "finished":
        return Tried(trial, outcome, reason, None, None, None, steps)
    points = {point.step: point for point in read_curve(run).points}
    if 0 not in points or steps not in points:
        return Tried(trial, "diverged", "the held-out loss is not finite", None, None, None, steps)
    last = points[steps]
    return Tried(trial, outcome, "", points[0].loss, last.loss, last.seconds, steps)


def _ending(config: CompareConfig, steps: int) -> str:
    """When a run ends, in words."""
    bounds = [f"{steps:,} steps"] if steps != UNBOUNDED_STEPS else []
    if config.max_seconds:
        bounds.append(f"{config.max_seconds:g} training seconds")
    ending = f"at most {' and '.join(bounds)}"
    return ending + (f", to held-out loss {config.target_loss:g}" if config.target_loss else "")


def _check_held_out(config: CompareConfig) -> None:
    drawn = config.data.startswith("random:")
    if config.eval_data is not None or (config.valid_split is not None and not drawn):
        return
    if hub_dataset(config.data) is not None:
        return  # training finds out, where it loads it
    if not drawn and split_file(config.data, "valid") and Path(config.data).is_dir():
        return
    way_out = (
        "--eval-data random:SEED, with another seed"
        if drawn
        else "--eval-data or --valid-split, or a folder with train and valid as --data"
    )
    raise UsageError(f"{config.data} has no held-out rows to compare by; give {way_out}")
