"""The training loop: plan, steps, saves, resume, and the budget's promise.

Invariant: whatever ends a run (its last step, a signal, its budget), the state that is left is a
whole number of steps, and going on from it gives the bits that an uninterrupted run would have.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ondevice.bundle import Bundle, storage_errors, write_atomic
from ondevice.config import TrainConfig, load, to_toml
from ondevice.errors import (
    BundleError,
    DataError,
    DivergedError,
    InterruptedRunError,
    UsageError,
)
from ondevice.manifest import Block
from runtime.activations import Activations
from runtime.adapters import Adapters
from runtime.backend import describe
from runtime.data import (
    Rows,
    TokenRows,
    row_index,
    split_file,
)
from runtime.evaluate import Events, check_budget, evaluate_rows, open_rows
from runtime.mebp import MeBP
from runtime.memory import Meter
from runtime.method import Row, StepLoss
from runtime.optimizer import Optimizer, learning_rate
from runtime.plan import Plan
from runtime.program import Gradients
from runtime.saves import CONFIG, PLAN, SUMMARY, TOKENS, RunFolder
from runtime.session import Session, open_checked, open_session, plan_of


@dataclass
class _Stop:
    """Whether SIGINT or SIGTERM has arrived."""

    signal: int | None = None


@contextmanager
def _catching_signals() -> Iterator[_Stop]:
    """Note the first signal and go on to the step's end; a second Ctrl-C ends at once."""
    stop = _Stop()

    def note(number: int, frame: Any) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Training:
    """One run in progress."""

    config: TrainConfig
    folder: RunFolder
    session: Session
    adapters: Adapters
    optimizer: Optimizer
    method: MeBP
    rows: Rows
    eval_rows: Rows | None
    events: Events
    meter: Meter
    done: int = 0
    evaluations: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Train to the last step; returns the summary."""
        if self.eval_rows is not None and "before" not in self.evaluations:
            self._evaluate("before")
        self._evaluate_if_due()
        with storage_errors(self.folder.metrics):
            metrics = self.folder.metrics.open("a")
        with metrics, _catching_signals() as stop:
            while self.done < self.config.steps:
                entry = self._step()
                with storage_errors(self.folder.metrics):
                    metrics.write(json.dumps(entry) + "\n")
                    metrics.flush()
                self.events.step(entry, self.config.steps)
                self._after_step(stop)
        if self.eval_rows is not None:
            self._evaluate("after")
        return self._finish()

    def _evaluate_if_due(self) -> None:
        """Evaluate where `eval_every` says so, unless it was done before the run was resumed."""
        due = self.config.eval_every and self.done % self.config.eval_every == 0
        inside = 0 < self.done < self.config.steps
        if due and inside and self.eval_rows and str(self.done) not in self.evaluations:
            self._evaluate(str(self.done))

    def _after_step(self, stop: _Stop) -> None:
        every = self.config.save_every
        finished = self.done == self.config.steps
        due = finished or (every and self.done % every == 0)
        if due or stop.signal is not None or self.meter.over_budget:
            self.folder.save(self.done, self.adapters, self.optimizer)
        resume = f"go on with: ondevice train --resume {self.folder.path}"
        check_budget(
            self.meter,
            self.session.plan,
            f"its state after step {self.done} is saved; {resume} --budget MORE",
        )
        if stop.signal is not None and not finished:
            name = signal.Signals(stop.signal).name
            raise InterruptedRunError(f"{name}: saved after step {self.done}; {resume}")
        self._evaluate_if_due()

    def _step(self) -> dict[str, Any]:
        start = time.perf_counter()
        config = self.config
        size, parts = config.batch_size, config.grad_accumulation
        first = self.done * size * parts
        rows = [self._row(first + index) for index in range(size * parts)]
        tokens = sum(len(row.targets) for row in rows)
        rate = learning_rate(
            config.learning_rate, config.lr_schedule, config.warmup_steps, config.steps, self.done
        )
        self.optimizer.begin(self.done, rate)
        held: dict[Block, Gradients] = {}

        def hold(block: Block, gradients: Gradients) -> None:
            before = held.get(block)
            if before is not None:
                gradients = {
                    name: (before[name][0] + da, before[name][1] + db)
                    for name, (da, db) in gradients.items()
                }
                mx.eval([array for pair in gradients.values() for array in pair])
            held[block] = gradients

        loss = StepLoss(0.0, 0, 0)
        for part in range(parts):
            micro = rows[part * size : (part + 1) * size]
            method = replace(
                self.method, program=self.session.program(max(len(r.inputs) for r in micro))
            )
            loss += method.step(micro, tokens, self.optimizer.apply if parts == 1 else hold)
        for block, gradients in held.items():
            self.optimizer.apply(block, gradients)
        if not math.isfinite(loss.loss_sum):
            raise DivergedError(
                f"the loss of step {self.done + 1} is {loss.loss_sum}; the last save is intact; "
                "lower --learning-rate"
            )
        self.done += 1
        return {
            "step": self.done,
            "loss": loss.loss_sum / tokens,
            "learning_rate": rate,
            "tokens": tokens,
            "seconds": time.perf_counter() - start,
            "footprint_bytes": self.meter.now_bytes,
            "peak_footprint_bytes": self.meter.peak_bytes,
            "peak_rss_bytes": self.meter.peak_rss_bytes,
        }

    def _row(self, position: int) -> Row:
        return Row(*self.rows.row(row_index(self.config.seed, position, len(self.rows))))

    def _evaluate(self, when: str) -> None:
        assert self.eval_rows is not None
        result = evaluate_rows(
            self.session,
            self.adapters,
            self.eval_rows,
            self.config.eval_rows,
            self.events,
            f"evaluating ({when})",
            self.meter,
        )
        self.evaluations[when] = result
        self.folder.write_json("evaluations.json", self.evaluations)

    def _finish(self) -> dict[str, Any]:
        entries = [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]
        if len(entries) != self.done:
            raise BundleError(
                f"{self.folder.metrics} has {len(entries)} lines for {self.done} steps; the "
                f"adapters in {self.folder.path} are whole, their summary cannot be"
            )
        seconds = [entry["seconds"] for entry in entries]
        plan = self.session.plan
        summary = {
            "method": self.config.method,
            "steps": self.done,
            "budget_bytes": self.config.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            # of all processes that this run has had
            "peak_footprint_bytes": max(
                self.meter.peak_bytes, *(e["peak_footprint_bytes"] for e in entries)
            ),
            "peak_rss_bytes": max(
                self.meter.peak_rss_bytes, *(e["peak_rss_bytes"] for e in entries)
            ),
            "step_s_median": statistics.median(seconds),
            "tokens_per_s": sum(e["tokens"] for e in entries) / sum(seconds),
            "final_train_loss": entries[-1]["loss"],
            "trainable_parameters": sum(t.size for t in self.adapters.tensors.values()),
            "eval": self.evaluations,
            "machine": describe(),
        }
        self.folder.write_json(SUMMARY, summary)
        return summary


def train(config: TrainConfig, events: Events) -> dict[str, Any]:
    """Start a run. Returns its summary.

    Raises:
        OnDeviceError: of the kind that says what is wrong; a refused run leaves nothing behind.
    """
    with Meter(budget_bytes=config.budget_bytes) as meter:
        bundle = open_checked(config.bundle)
        plan = plan_of(config, bundle)
        events.plan(plan)
        folder = RunFolder(Path(config.output))
        existed = folder.path.exists()
        folder.create()
        try:
            fixed = replace(
                config,
                bundle=str(Path(config.bundle).resolve()),
                data=_absolute(config.data),
                output=str(folder.path.resolve()),
                eval_data=None if config.eval_data is None else _absolute(config.eval_data),
            )
            rows, eval_rows = _rows(fixed, bundle, folder)
            training = _assemble(fixed, bundle, plan, folder, rows, eval_rows, None, events, meter)
            folder.write_json(PLAN, plan.to_json())
            write_atomic(folder.path / CONFIG, to_toml(fixed).encode())
        except BaseException:
            _remove_refused(folder, existed)
            raise
        with folder.locked():
            return training.run()


def resume(path: Path, events: Events, budget: str | None = None) -> dict[str, Any]:
    """Go on with the run in `path` from its last save, under another budget where one is given.

    Another budget may choose other tile sizes, which change results in the last bits.
    """
    folder = RunFolder(path)
    if not (path / CONFIG).exists():
        raise UsageError(f"{path} holds no run to resume: it has no {CONFIG}")
    given = {} if budget is None else {"budget": budget}
    config = replace(load(TrainConfig, path / CONFIG, given), output=str(path))
    with folder.locked(), Meter(budget_bytes=config.budget_bytes) as meter:
        bundle = open_checked(config.bundle)
        plan = plan_of(config, bundle)
        events.plan(plan)
        rows, eval_rows = _rows(config, bundle, folder)
        save = folder.latest()
        training = _assemble(config, bundle, plan, folder, rows, eval_rows, save, events, meter)
        if save is not None:  # a kill may have come between the save and this copy of it
            training.adapters.save(path)
        if json.dumps(plan.to_json()) != json.dumps(json.loads((path / PLAN).read_text())):
            events.note("the run is planned otherwise than before; its last bits may differ")
        folder.write_json(PLAN, plan.to_json())
        write_atomic(path / CONFIG, to_toml(config).encode())
        folder.truncate_metrics(training.done)
        done = path / "evaluations.json"
        if done.exists():
            training.evaluations = json.loads(done.read_text())
            training.evaluations.pop("after", None)
        events.note(f"resuming after step {training.done} of {config.steps}")
        return training.run()


def _absolute(data: str) -> str:
    return data if data.startswith("random:") else str(Path(data).resolve())


def _rows(config: TrainConfig, bundle: Bundle, folder: RunFolder) -> tuple[Rows, Rows | None]:
    """Training and evaluation rows; token files live in the run, so resuming reads the same."""
    length = config.max_seq_length
    found: list[Rows | None] = []
    sources = [(config.data, "train", TOKENS[0])]
    folder_data = not config.data.startswith("random:") and Path(config.data).is_dir()
    held_out = folder_data and split_file(config.data, "valid") is not None
    eval_data = config.eval_data or (config.data if held_out else None)
    if eval_data is not None:
        sources.append((eval_data, "valid", TOKENS[1]))
    for data, split, name in sources:
        ready = folder.path / name
        if ready.exists():
            found.append(TokenRows(ready, bundle.manifest.vocab_size))
        else:
            found.append(open_rows(bundle, data, split, length, folder.path, name))
    rows = found[0]
    assert rows is not None
    if len(rows) == 0:
        raise DataError(f"{config.data} holds no row to train on")
    return rows, found[1] if len(found) > 1 else None


def _assemble(
    config: TrainConfig,
    bundle: Bundle,
    plan: Plan,
    folder: RunFolder,
    rows: Rows,
    eval_rows: Rows | None,
    save: Path | None,
    events: Events,
    meter: Meter,
) -> Training:
    session = open_session(bundle, plan)
    manifest = bundle.manifest
    step, adapters = 0, None
    if save is not None:
        step, adapters = folder.restore(manifest, save)
    if adapters is None:
        adapters = Adapters.initial(manifest, config.seed)
    optimizer = Optimizer(adapters, config.optimizer, config.weight_decay, folder.path)
    if save is not None:
        optimizer.read(save / "optimizer.bin")
    shape = (1, plan.rung, manifest.hidden_size)
    slots = len(manifest.blocks)
    activations = Activations(folder.path, slots, config.batch_size, shape)
    method = MeBP(session.program(plan.rung), adapters, activations)
    return Training(
        config,
        folder,
        session,
        adapters,
        optimizer,
        method,
        rows,
        eval_rows,
        events,
        meter,
        done=step,
    )


def _remove_refused(folder: RunFolder, existed: bool) -> None:
    """Take back what a run that never started has written, and nothing else."""
    if not existed:
        shutil.rmtree(folder.path)
        return
    for path in folder.path.iterdir():  # it was empty before
        shutil.rmtree(path) if path.is_dir() else path.unlink()
