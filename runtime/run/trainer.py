"""The training loop: steps, evaluations, saves, and the check of the memory budget.

The loop picks the rows of a step; the method's `step` computes the update and applies it.

Invariant: whatever ends a run (its last step, a signal, its budget), the saved state is that after
a whole number of steps, and resuming gives the same bits as an uninterrupted run.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from runtime.core.errors import (
    BudgetError,
    DivergedError,
    InterruptedRunError,
    StorageError,
    WorkerError,
)
from runtime.core.signals import Stop, catching_signals, cause
from runtime.data.token_rows import Rows
from runtime.engine.sample import Sample
from runtime.machine.backend import describe
from runtime.parallel.workers import AGREE_STEPS
from runtime.run.budget import passed_budget
from runtime.run.ending import FOUND_BY_EVALUATION, ended
from runtime.run.evaluate import evaluate_rows
from runtime.run.folder import EVALUATIONS, OTHER_EVALUATIONS, SPEEDS
from runtime.run.opened import Opened, Progress
from runtime.run.results import (
    Best,
    Evaluation,
    Step,
    TrainResult,
    best_of,
    final_loss,
    no_better_since,
    read_steps,
)
from runtime.run.schedule import epochs_of, learning_rate
from runtime.storage.saves import CONFIG, SLOTS, SUMMARY, State

PACED = 4  # steps by which the workers' speeds are measured; the first does not count
SKIPS = 10  # steps in a row without a finite loss that end a run


class Trainer:
    """The training loop of one run."""

    def __init__(self, opened: Opened, state: State | None, before: Progress) -> None:
        self.config, self.folder, self.session = opened.config, opened.folder, opened.session
        self.adapters, self.method = opened.state(state)
        self.samples, self.rows = opened.samples, opened.rows
        self.eval_rows = opened.rows.valid
        self.events, self.meter, self.team = opened.events, opened.meter, opened.team
        self.done = self.first = before.done
        self.seconds = before.seconds
        self.evaluations = dict(before.evaluations)
        self.others = {name: dict(known) for name, known in before.others.items()}
        self.skipped = 0  # steps in a row whose loss was not finite
        self.stop = Stop()
        self.peaks: tuple[int, ...] = ()  # footprints of the workers' processes
        self._pace: list[float] = []  # forward passes per second of this process, by step
        self._in_step = False

    def run(self) -> TrainResult:
        """Train to the end; returns the summary."""
        heartbeat, fleet = self.team.heartbeat, self.team.workers.fleet
        was_stopped = None if heartbeat is None else heartbeat.was_stopped
        if self.team.size > 1:
            self.team.recall(self.folder.speeds())
        try:
            with catching_signals(was_stopped) as self.stop:
                if fleet is not None:
                    fleet.digest = self.method.digest
                    fleet.hurry = lambda: self.stop.signal is not None
                try:
                    self._run()
                    if fleet is not None:
                        fleet.end()
                except WorkerError as problem:
                    raise self._without(problem) from None
            return self._finish()
        except StorageError as problem:
            if self.team.rank or not (self.folder.path / CONFIG).exists():  # it was moved
                raise
            raise StorageError(f"{problem}; {self._saved_last}") from problem

    def _run(self) -> None:
        self.session.profile.on = self.config.profile
        if self.config.adapter is not None and self.done == 0:
            self._save()  # the files at the path may change before the run is resumed
        self._go_beyond_an_end()
        if self.eval_rows is not None and "before" not in self.evaluations:
            self._evaluate("before")
        elif self.done == 0 and self._best is not None:
            self._save()  # a kill may have come between that evaluation and its save
        if self.done == 0:
            self._evaluate_others("before")
        self._evaluate_if_due()
        self._train()
        if self.ended in FOUND_BY_EVALUATION:  # which comes after a save
            self._save()
        if self.eval_rows is not None and "after" not in self.evaluations:
            self._evaluate("after")
        self._evaluate_others("after")

    def _go_beyond_an_end(self) -> None:
        """Take back the files of an earlier end of the run: it ends later.

        Its summary goes. The evaluation that was made "after" stays, by its step.
        """
        if self.ended:
            return
        (self.folder.path / SUMMARY).unlink(missing_ok=True)
        for known in self.others.values():
            known.pop("after", None)
        if "after" not in self.evaluations:
            return
        earlier = self.evaluations.pop("after")
        if self.done:
            self.evaluations.setdefault(str(self.done), earlier)
        self.folder.write_json(EVALUATIONS, self.evaluations)

    def _train(self) -> None:
        while not self.ended:
            step, record = self._step()
            self.folder.metrics.append(json.dumps(msgspec.to_builtins(step)) + "\n")
            if self.method.keeps_log:
                line = json.dumps(record) + "\n"
                self.folder.trajectory.append(line)
                if self.team.workers.fleet is not None:
                    self.team.workers.fleet.learned(line)
            self.events.step(step, self.config.all_steps)
            self._after_step()

    def _without(self, problem: WorkerError) -> WorkerError:
        """The error of a run that has lost a worker; saves the state if it is that of a step."""
        if self.team.heartbeat is not None:
            self.team.heartbeat.notice()
        whole = not self._in_step or self.method.whole
        if whole and not problem.differs:
            self._write_save()
        again = self._saved_last
        if problem.differs and self.config.trains_all:
            again += f", after removing {SLOTS} there: then the weights are rebuilt from the log"
        return WorkerError(f"{problem}; {again}", problem.exit_code)

    def _agree(self) -> None:
        """Compare what all workers have trained; weights seldom, since each step saves them."""
        whole = self.config.trains_all
        if self.team.size == 1 or (whole and self.done % AGREE_STEPS and not self.ended):
            return
        trained = "weights" if whole else "adapters"
        self.team.compare(f"the {trained} after step {self.done}", self.method.digest())

    def _save(self) -> None:
        self._agree()
        self._write_save()

    def _write_save(self) -> None:
        best = self._best
        evaluated = tuple(when for when in self.evaluations if when != "after")
        adapters = None if self.config.trains_all else self.adapters
        self.folder.save(
            self.done,
            adapters,
            self.method,
            self.config.keep,
            None if best is None else best.step,
            evaluated,
        )

    @property
    def _best(self) -> Best | None:
        """The evaluation whose state `--keep-best` keeps."""
        return best_of(self.evaluations, self.done) if self.config.keep_best else None

    @property
    def _saved(self) -> str:
        """The end of a message about a run that has just been saved."""
        if self.team.rank:
            return f"after step {self.done}"  # rank 0 saves, and says so
        return self._saved_after(self.done)

    @property
    def _saved_last(self) -> str:
        """The same for a run whose last save may be older, or which has none."""
        save = self.folder.saves.latest()
        return self._saved_after(None if save is None else self.folder.saves.step_of(save))

    def _saved_after(self, step: int | None) -> str:
        known = step is not None
        state = f"its state after step {step} is saved" if known else "nothing was saved yet"
        return f"{state}; go on with: ondevice train --resume {self.folder.path}"

    @property
    def ended(self) -> str:
        """Why the run is over, a key of ENDS; empty while it is not."""
        return ended(self.config, self.done, self.seconds, self.evaluations)

    def _evaluate_if_due(self) -> None:
        """Evaluate where `eval_every` says so, unless it was done before the run was resumed."""
        due = self.config.eval_every and self.done % self.config.eval_every == 0
        inside = self.done > 0 and not self.ended
        if due and inside and self.eval_rows and str(self.done) not in self.evaluations:
            self._evaluate(str(self.done))

    def _after_step(self) -> None:
        news = self.team.news(self.seconds, self.stop.signal, self.meter)
        self.seconds = news.seconds  # rank 0's, so that all end after the same step
        self.peaks = news.peaks
        every = self.config.save_every
        due = self.ended or self.config.trains_all or (every and self.done % every == 0)
        lost = self.skipped >= SKIPS
        if due or lost or news.signals or news.over:
            self._save()
        elif self.done % AGREE_STEPS == 0:
            self._agree()
        if lost:
            learned = self.done > self.skipped  # else the first step's loss was not finite either
            raise DivergedError(
                f"the loss was not finite {self.skipped} steps in a row; the state after step "
                f"{self.done} is saved in {self.folder.path}; "
                + ("lower --learning-rate" if learned else "lower --epsilon")
            )
        for rank, peak_bytes in news.over.items():
            way_out = f"{self._saved} --budget MORE"
            raise passed_budget(peak_bytes, self.session.plan, way_out, self.team.where(rank))
        if news.signals and not self.ended:
            rank, number = next(iter(news.signals.items()))
            where = "" if len(news.signals) == self.team.size else self.team.where(rank)
            raise InterruptedRunError(f"{cause(number, where)}: {self._saved}")
        self._balance()
        self._evaluate_if_due()

    def _balance(self) -> None:
        """Share the work by the workers' speeds, once the first steps have shown them."""
        if self.team.size == 1 or self.team.speeds is not None or len(self._pace) < PACED:
            return
        paces = sorted(self._pace[1:])
        speeds = self.team.measure(paces[len(paces) // 2])  # the median of an odd number
        self.folder.write_json(SPEEDS, speeds)
        if self.team.workers.speeds:
            named = ", ".join(
                f"{passes_per_s:.3g} of {self.team.named(rank)}"
                for rank, passes_per_s in enumerate(speeds.passes_per_s)
            )
            self.events.note(f"the work is shared by the forward passes per second: {named}")

    def parts(self) -> list[list[Sample]]:
        """The samples of the next step, by micro-batch."""
        size, count = self.config.batch_size, self.config.grad_accumulation
        first = self.done * size * count
        return [
            [self.samples.at(first + part * size + index) for index in range(size)]
            for part in range(count)
        ]

    def _step(self) -> tuple[Step, list[Any] | None]:
        """Train one step; returns it, and its line of the trajectory."""
        start = time.perf_counter()
        parts = self.parts()
        rate = learning_rate(self.config, self.done)
        workers, exchange = self.team.workers, self.team.workers.exchange
        passes, sent_bytes, waited_s = workers.passes, exchange.sent_bytes, exchange.waited_s
        self._in_step = True
        result = self.method.step(self.done, rate, parts)
        self._in_step = False
        loss = result.loss.loss_sum / result.loss.scored_tokens
        self.skipped = result.skipped
        if not math.isfinite(loss) and not result.skipped:
            raise DivergedError(
                f"the loss of step {self.done + 1} is {loss}; the last save is intact; "
                "lower --learning-rate"
            )
        self.done += 1
        seconds = time.perf_counter() - start
        self.seconds += seconds
        worked_s = seconds - (exchange.waited_s - waited_s)
        if len(self._pace) < PACED:
            self._pace.append((workers.passes - passes) / worked_s)
        step = Step(
            number=self.done,
            loss=_finite(loss),
            learning_rate=rate,
            scored_tokens=result.loss.scored_tokens,
            tokens=sum(len(row.inputs) for part in parts for row in part),
            forward_passes=result.forward_passes,
            seconds=seconds,
            footprint_bytes=self.meter.now_bytes,
            peak_footprint_bytes=self.meter.peak_bytes,
            peak_rss_bytes=self.meter.peak_rss_bytes,
            skipped=result.skipped > 0,
            sent_bytes=exchange.sent_bytes - sent_bytes + self.team.news_bytes,
            gradient_norm=None if result.gradient_norm is None else _finite(result.gradient_norm),
            **result.shown,
        )
        return step, result.record

    def _evaluate(self, when: str) -> None:
        assert self.eval_rows is not None
        self.method.settle()
        same = str(self.done) if self.done else "before"
        known = self.evaluations.get(same) if when == "after" else None
        result = known or self._measured(
            self.eval_rows, self.config.eval_rows, f"evaluating ({when})"
        )
        # of which step it is, for a run that goes on from an earlier save
        ended = {"step": self.done} if when == "after" else {}
        self.evaluations[when] = msgspec.structs.replace(result, **ended)
        self.folder.write_json(EVALUATIONS, self.evaluations)
        if not known:
            self.events.evaluated(when, result)
        if (best := self._best) is not None and best.step == self.done:
            self._save()

    def _measured(self, rows: Rows, limit: int, name: str) -> Evaluation:
        """The evaluation of rows as the model is now; the state is saved if it cannot end."""
        self.session.profile.on = False
        try:
            result = evaluate_rows(
                *(self.session, self.adapters, rows, limit, self.events, name),
                *(self.meter, self.stop),
                workers=self.team.workers,
            )
        except (BudgetError, InterruptedRunError) as problem:
            if self.team.rank:
                raise  # rank 0 saves, and shows the message
            self._write_save()
            more = " --budget MORE" if isinstance(problem, BudgetError) else ""
            raise type(problem)(f"{problem}; {self._saved}{more}") from None
        self.session.profile.on = self.config.profile
        return result

    def _evaluate_others(self, when: str) -> None:
        """Evaluate the data of `also_evaluate`, but for what is known."""
        self.method.settle()
        for data, rows in self.rows.others.items():
            known = self.others.setdefault(data, {})
            if when not in known:
                name = f"evaluating {Path(data).name} ({when})"
                known[when] = self._measured(rows, 0, name)
                self.folder.write_json(OTHER_EVALUATIONS, self.others)

    def _finish(self) -> TrainResult:
        self.method.settle()
        whole = f"the adapters in {self.folder.path} are whole, their summary cannot be"
        steps = list(read_steps(self.folder.metrics.path, self.done, whole))
        best = self._best
        if best is not None:
            self.folder.publish(best.step)
        # a kill may have come between the last save and this
        self.folder.remove_old(self.config.keep, None if best is None else best.step)
        seconds = [step.seconds for step in steps]
        plan = self.session.plan
        losses = [step.loss for step in steps if step.loss is not None]
        sent = [step.sent_bytes for step in steps if step.sent_bytes]
        measured = {}
        if self.config.profile:
            measured = self.session.profile.to_json(max(1, self.done - self.first))
        summary = TrainResult(
            method=self.config.method,
            steps=self.done,
            stopped=self.ended,
            skipped_steps=len(steps) - len(losses),
            epochs=epochs_of(self.config, self.samples, self.done),
            forward_passes=sum(step.forward_passes for step in steps),
            seconds=sum(seconds),
            budget_bytes=self.config.budget_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            peak_footprint_bytes=max(
                [self.meter.peak_bytes, *(step.peak_footprint_bytes for step in steps)]
            ),
            peak_rss_bytes=max(
                [self.meter.peak_rss_bytes, *(step.peak_rss_bytes for step in steps)]
            ),
            sent_bytes_per_step=round(sum(sent) / len(sent)) if sent else None,
            worker_peak_bytes=self.peaks if self.team.size > 1 else (),
            received_weight_bytes=self.team.received_weight_bytes,
            mlx_peak_bytes=mx.get_peak_memory(),
            step_s_median=_median(seconds) if seconds else None,
            tokens_per_s=_per_second(sum(step.tokens for step in steps), seconds),
            scored_tokens_per_s=_per_second(sum(step.scored_tokens for step in steps), seconds),
            final_train_loss=final_loss(losses),
            trainable_parameters=(
                self.session.bundle.manifest.parameters
                if self.config.trains_all
                else self.adapters.size
            ),
            trained=self.config.trainable,
            lora=self.adapters.manifest.lora.to_json(),
            evaluations=self.evaluations,
            best=best,
            evaluations_no_better=no_better_since(
                self.evaluations, self.done, self.config.min_delta
            ),
            others=self.others,
            data=self.rows.reports,
            packing=self.samples.packing_report,
            machine=describe(),
            **measured,
        )
        self.folder.write_json(SUMMARY, summary)
        return summary


def _finite(value: float) -> float | None:
    """The value, or None if it is not finite, which JSON cannot say."""
    return value if math.isfinite(value) else None


def _median(values: list[float]) -> float:
    """The median; NumPy's would load 20 ms of masked arrays."""
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2


def _per_second(count: int, seconds: list[float]) -> float | None:
    """A count, for each second of training."""
    return count / sum(seconds) if sum(seconds) else None
