"""`ondevice compare`: which method reaches the quality that is wanted first, and what it costs.

    config.toml   the settings
    sweep/   runs/   profile/   a run folder for each try, each method, each method's profile
    compare.json   compare.txt   compare.html   *.png   what was found

Each method runs in fresh processes, one at a time, on the same rows in the same order, from the
same adapters, under the same budget, after a sweep over its declared grid. Invariant: what is
found is a function of the run folders alone, so a comparison that was interrupted goes on where it
was, and one that is finished is only reported again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from harness.compare.findings import Finding, Trial, Tried, findings
from harness.compare.quality import read_curve
from harness.measure.process import measure
from harness.report.report import write_report
from ondevice.config.base import load, to_toml
from ondevice.config.compare import CompareConfig, by_method
from ondevice.errors import (
    BudgetError,
    DivergedError,
    InterruptedRunError,
    OnDeviceError,
    UsageError,
)
from ondevice.files import storage_errors, write_atomic
from runtime.data.rows import split_file

CONFIG, SWEEP, RUNS, PROFILE = "config.toml", "sweep", "runs", "profile"
FOLDERS = (SWEEP, RUNS, PROFILE)
PROFILE_STEPS = 3  # in a run of their own, as a profile slows what it explains
SPOILT = 1.1  # times the loss before training: what a rate has spoilt that far is not trained on
ASIDE, REASON, DIVERGED = ".aside", "aside.json", ".diverged.json"
UNBOUNDED_STEPS = 1_000_000  # where seconds end a run
# the lengths of the MeBP paper's Figure 1: they bound a run that only a target would end
PAPER_STEPS = {"mebp": 1_000, "mezo": 100_000}
Note = Callable[[str], None]
Measure = Callable[[Mapping[str, object], Path], dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """A comparison in its directory."""

    config: CompareConfig
    place: Path
    note: Note
    measure: Measure

    def run(self) -> dict[str, Any]:
        """Run what is not finished yet, and write what was found; returns `compare.json`.

        Raises:
            InterruptedRunError: a signal arrived; the same command goes on.
            BudgetError, DivergedError: not one method could run.
        """
        found = {method: self._method(method) for method in self.config.method_names}
        if not any(finding.curve and finding.curve.points for finding in found.values()):
            said = "; ".join(f"{name}: {finding.reason}" for name, finding in found.items())
            over = any(finding.outcome == "over budget" for finding in found.values())
            raise (BudgetError if over else DivergedError)(f"no method could run: {said}")
        report = findings(self.config, found)
        write_report(report, self.place)
        return report

    def _method(self, method: str) -> Finding:
        trials = grid(self.config, method)
        if len(trials) == 1:
            return self._run(trials[0], (), None)
        tried = self._sweep(method, trials)
        while (best := choose(tried)) is not None:
            aside = self.place / RUNS / f"{trials[best].name}{ASIDE}"
            if not aside.exists():
                found = self._run(trials[best], tried, best)
                others = choose(_without(tried, best)) is not None
                if not (others and self._set_aside(found, aside)):
                    return found
            known = json.loads((aside / REASON).read_text())
            tried = _without(tried, best, known["outcome"], known["reason"])
        last = tried[-1]
        return Finding(None, tried, None, last.outcome, last.reason, None, None, None)

    def _set_aside(self, found: Finding, aside: Path) -> bool:
        """Keep a run that its rate has spoilt under another name; False where it is a good one."""
        assert found.trial is not None
        run = self.place / RUNS / found.trial.method
        rose = found.summary is not None and found.summary["stopped"] == "rise"
        if not (rose or found.outcome == "diverged") or not run.exists():
            return False
        reason = f"in its run: {found.reason}"
        if rose and found.curve and found.curve.points:
            first, last = found.curve.points[0], found.curve.points[-1]
            reason = (
                f"in its run the held-out loss had risen from {first.loss:.4f} to {last.loss:.4f} "
                f"at step {last.step:,}"
            )
        told = {"outcome": "rose" if rose else "diverged", "reason": reason}
        write_atomic(run / REASON, json.dumps(told).encode())
        run.with_name(f"{run.name}{DIVERGED}").unlink(missing_ok=True)
        if (profile := self.place / PROFILE / run.name).exists():
            shutil.rmtree(profile)  # of the settings that are given up
        run.rename(aside)
        self.note(f"{found.trial.method}: {found.trial}: {reason}; taking the next best")
        return True

    def _run(self, trial: Trial, tried: tuple[Tried, ...], chosen: int | None) -> Finding:
        method = trial.method
        steps = step_limit(self.config, method)
        self.note(f"{method}: {trial}, {_ending(self.config, steps)}")
        settings = {
            **_common(self.config, trial),
            "steps": steps,
            "eval_every": by_method(self.config.eval_every)[method],
            "eval_rows": self.config.eval_rows,
            "stop_seconds": self.config.max_seconds,
            "stop_loss": self.config.target_loss,
            "stop_rise": SPOILT,
        }
        run = self.place / RUNS / method
        outcome, reason, summary = self._attempt(f"the run of {method}", settings, run)
        curve = read_curve(run) if (run / "evaluations.json").exists() else None
        profile = self._profile(trial) if curve is not None else None
        return Finding(trial, tried, chosen, outcome, reason, curve, summary, profile)

    def _profile(self, trial: Trial) -> dict[str, Any] | None:
        """Where a step's time and memory go; None where the profile's run did not finish."""
        method = trial.method
        self.note(f"{method}: profile, {PROFILE_STEPS} steps")
        settings = {
            **_common(self.config, trial),
            "steps": PROFILE_STEPS,
            "eval_rows": 1,
            "profile": True,
        }
        run = self.place / PROFILE / method
        _, _, summary = self._attempt(f"the profile of {method}", settings, run)
        return summary and {key: summary[key] for key in ("seconds_per_step", "blocks")}

    def _sweep(self, method: str, trials: Sequence[Trial]) -> tuple[Tried, ...]:
        steps = by_method(self.config.sweep_steps)[method]
        tried: list[Tried] = []
        for number, trial in enumerate(trials, start=1):
            what = f"sweep {number} of {len(trials)} of {method}"
            self.note(f"{what}: {trial}, {steps} steps")
            settings = {
                **_common(self.config, trial),
                "steps": steps,
                "eval_rows": self.config.sweep_rows or self.config.eval_rows,
            }
            run = self.place / SWEEP / trial.name
            outcome, reason, _ = self._attempt(what, settings, run)
            tried.append(_tried(trial, outcome, reason, run))
            if outcome == "over budget":
                break  # so would all others be: rates change no plan
        return tuple(tried)

    def _attempt(
        self, what: str, settings: Mapping[str, object], run: Path
    ) -> tuple[str, str, dict[str, Any] | None]:
        """How a run ended, why where it did not finish, and its summary where it did."""
        diverged = run.with_name(f"{run.name}{DIVERGED}")
        if diverged.exists():
            return "diverged", json.loads(diverged.read_text())["reason"], None
        try:
            return "finished", "", self.measure(settings, run)
        except DivergedError as problem:
            reason = str(problem).replace(str(run), run.name)
            write_atomic(diverged, json.dumps({"reason": reason}).encode())
            return "diverged", reason, None
        except BudgetError as problem:
            return "over budget", str(problem).replace(str(run), run.name), None
        except InterruptedRunError:
            raise InterruptedRunError(
                f"interrupted in {what}; all that is done is kept in {self.place}: give the same "
                "command again to go on"
            ) from None


def compare(config: CompareConfig, note: Note, measure: Measure = measure) -> dict[str, Any]:
    """Run a comparison, or go on with it; returns what `compare.json` holds.

    `measure` trains with the settings it is given in the folder it is given (see there).

    Raises:
        UsageError: there are no held-out rows, or the directory holds something else.
        OnDeviceError: see `Comparison.run`; a comparison refused at its start leaves nothing.
    """
    fixed = _fixed(config)
    _check_held_out(fixed)
    place = Path(fixed.output)
    existed = place.exists()
    _open_place(place, fixed)
    try:
        return Comparison(fixed, place, note, measure).run()
    except OnDeviceError:
        begun = any((place / name / CONFIG).exists() for name in _run_names(place))
        if not begun:
            _take_back(place, existed)
        raise


def grid(config: CompareConfig, method: str) -> list[Trial]:
    """Every setting that the sweep of `method` tries."""
    if method == "mezo":
        pairs = product(config.mezo_learning_rates, config.mezo_epsilons)
        return [Trial(method, rate, epsilon, config.mezo_queries) for rate, epsilon in pairs]
    return [Trial(method, rate) for rate in config.mebp_learning_rates]


def choose(tried: Sequence[Tried]) -> int | None:
    """The index of the try with the lowest held-out loss; None where none has one."""
    losses = [
        math.inf if one.loss is None or one.outcome != "finished" else one.loss for one in tried
    ]
    best = min(losses)
    return losses.index(best) if math.isfinite(best) else None


def _without(
    tried: tuple[Tried, ...], index: int, outcome: str = "", reason: str = ""
) -> tuple[Tried, ...]:
    """`tried` with another end for one of them, which is then not chosen."""
    spoilt = replace(tried[index], outcome=outcome, reason=reason)
    return (*tried[:index], spoilt, *tried[index + 1 :])


def step_limit(config: CompareConfig, method: str) -> int:
    """How many steps `method` may take."""
    if config.steps is not None:
        return by_method(config.steps)[method]
    return UNBOUNDED_STEPS if config.max_seconds else PAPER_STEPS[method]


def _tried(trial: Trial, outcome: str, reason: str, run: Path) -> Tried:
    if outcome != "finished":
        return Tried(trial, outcome, reason, None, None, None)
    curve = read_curve(run)
    if not curve.points or curve.points[-1].step != len(curve.columns["step"]):
        return Tried(trial, "diverged", "the held-out loss is not finite", None, None, None)
    last, before = curve.points[-1], curve.points[0].loss
    return Tried(trial, outcome, "", before, last.loss, last.seconds)


def _common(config: CompareConfig, trial: Trial) -> dict[str, object]:
    """Settings of every run of `trial`."""
    shared = ("bundle", "data", "budget", "max_seq_length", "arithmetic", "batch_size", "seed")
    settings: dict[str, object] = {name: getattr(config, name) for name in shared}
    if config.eval_data is not None:
        settings["eval_data"] = config.eval_data
    settings |= {"method": trial.method, "learning_rate": trial.learning_rate}
    if trial.epsilon is not None:
        return settings | {"epsilon": trial.epsilon, "queries": trial.queries}
    return settings | {"optimizer": config.optimizer}


def _ending(config: CompareConfig, steps: int) -> str:
    """When a run ends, in words."""
    bounds = [f"{steps:,} steps"] if steps != UNBOUNDED_STEPS else []
    if config.max_seconds:
        bounds.append(f"{config.max_seconds:g} training seconds")
    ending = f"at most {' and '.join(bounds)}"
    return ending + (f", to held-out loss {config.target_loss:g}" if config.target_loss else "")


def _fixed(config: CompareConfig) -> CompareConfig:
    """The settings with whole paths, so that they mean the same from anywhere."""

    def whole(data: str) -> str:
        return data if data.startswith("random:") else str(Path(data).resolve())

    return replace(
        config,
        bundle=str(Path(config.bundle).resolve()),
        data=whole(config.data),
        eval_data=None if config.eval_data is None else whole(config.eval_data),
        output=str(Path(config.output).resolve()),
    )


def _check_held_out(config: CompareConfig) -> None:
    if config.eval_data is not None:
        return
    named = not config.data.startswith("random:")
    if named and split_file(config.data, "valid") and Path(config.data).is_dir():
        return
    raise UsageError(
        f"{config.data} has no held-out rows to compare by; give --eval-data, or a folder with "
        "train and valid as --data"
    )


def _open_place(place: Path, config: CompareConfig) -> None:
    """Make the directory, or check that what it holds is this comparison."""
    if (place / CONFIG).exists():
        there = vars(replace(load(CompareConfig, place / CONFIG, {}), output=config.output))
        odd = [
            f"{key} {value!r} (now {getattr(config, key)!r})"
            for key, value in there.items()
            if value != getattr(config, key)
        ]
        if odd:
            raise UsageError(
                f"{place} holds a comparison with other settings: {', '.join(odd)}; give those "
                "again to go on with it, or another -o"
            )
        return
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} is a file or holds other files; choose another -o")
    with storage_errors(place):
        for name in FOLDERS:
            (place / name).mkdir(parents=True, exist_ok=True)
    write_atomic(place / CONFIG, to_toml(config).encode())


def _run_names(place: Path) -> list[str]:
    return [f"{kind}/{run.name}" for kind in FOLDERS for run in (place / kind).iterdir()]


def _take_back(place: Path, existed: bool) -> None:
    """Remove what a comparison that never began has written."""
    if not existed:
        shutil.rmtree(place)
        return
    (place / CONFIG).unlink()
    for name in FOLDERS:
        shutil.rmtree(place / name)
