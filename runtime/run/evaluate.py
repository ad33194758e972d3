"""Evaluation: loss, perplexity and accuracy of held-out rows, under a memory budget."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from runtime.config.evaluate import EvalConfig
from runtime.core.errors import InterruptedRunError
from runtime.core.notes import warning
from runtime.data.rows import RandomRows, Rows
from runtime.data.source import TokenSource, reading_of
from runtime.engine.model import Model
from runtime.engine.sample import Row
from runtime.engine.visits import visit, visits
from runtime.machine.footprint import Meter
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import StepLoss
from runtime.objectives.accuracy import Accuracy
from runtime.objectives.labels import Ids, LabelAccuracy, labels_of
from runtime.objectives.next_token import NextToken
from runtime.objectives.objective import Objective, Scored, grouped, score
from runtime.run.budget import check_budget, plan_evaluation
from runtime.run.lora import to_apply
from runtime.run.results import Evaluation, EvaluationResult, Events, LabelShare
from runtime.run.session import Session, open_checked, open_session
from runtime.run.signals import Stop


def summarize(losses: Sequence[StepLoss]) -> Evaluation:
    """The evaluation of rows, from the loss of each."""
    total = sum(losses, StepLoss(0.0, 0, 0))
    loss = total.loss_sum / total.scored_tokens
    finite = math.isfinite(loss)
    bad = sum(not math.isfinite(row_loss.loss_sum) for row_loss in losses)
    return Evaluation(
        loss=loss if finite else None,
        perplexity=float(np.exp(min(loss, 700.0))) if finite else None,
        rows_not_finite=0 if finite else bad,
        accuracy=total.correct / total.scored_tokens,
        exact=sum(row_loss.correct == row_loss.scored_tokens for row_loss in losses) / len(losses),
        scored_tokens=total.scored_tokens,
        rows=len(losses),
    )


def evaluate(
    model: Model, adapters: Adapters, rows: Sequence[Row], objectives: Sequence[Objective]
) -> list[list[float]]:
    """The summand of each group of rows in each objective, forward only.

    All rows visit each block together, and the head once for all objectives.
    """
    with visit(model, 0):
        xs = [model.embed(row.inputs) for row in rows]
    for layer in visits(model):
        xs = model.forward_lanes(layer.block, xs, [adapters.loras(layer.block)] * len(rows))
    with visit(model, -1):
        hs = [model.hidden(xs.pop(0), row.scored) for row in rows]
        predictions = any(objective.predicts for objective in objectives)
        scored = score(model, rows, hs, predictions=predictions)
        return [
            [objective.value(group) for group in grouped(scored, objective.together)]
            for objective in objectives
        ]


def _side_by_side(
    session: Session, rows: Rows, count: int, together: int
) -> Iterator[tuple[Model, list[Row]]]:
    """The first `count` rows in order, those of one bucket that visit blocks together, by model.

    `together` neighbours are never parted.
    """
    waiting: list[Row] = []
    current: Model | None = None
    for numbers in grouped(range(count), together):
        group = [Row(*rows.row(index)) for index in numbers]
        model = session.model(max(len(row.inputs) for row in group))
        full = len(waiting) + len(group) > session.plan.evaluation_lanes
        if current is not None and (full or model is not current):
            yield current, waiting
            waiting = []
        current = model
        waiting += group
    if current is not None:
        yield current, waiting


def evaluate_rows(
    session: Session,
    adapters: Adapters,
    rows: Rows,
    limit: int,
    events: Events,
    name: str,
    meter: Meter,
    stop: Stop | None = None,
    objectives: Sequence[Objective] = (),
) -> Evaluation:
    """Evaluate the first `limit` rows (0: all, of random rows one): see `summarize`.

    Means of further `objectives` are added, as `Objective.shown` names them.

    Raises:
        BudgetError: the footprint has passed the meter's budget.
        InterruptedRunError: a signal has arrived in `stop`.
    """
    if not limit and isinstance(rows, RandomRows):
        limit = 1
    count = min(len(rows), limit) if limit else len(rows)
    together = math.lcm(*(objective.together for objective in objectives))
    losses: list[StepLoss] = []
    sums, counts = [0.0] * len(objectives), [0] * len(objectives)
    for model, chosen in _side_by_side(session, rows, count, together):
        measured = (NextToken(), Accuracy(), *objectives)
        entropies, misses, *others = evaluate(model, adapters, chosen, measured)
        losses += [
            StepLoss(entropy, -round(miss), len(row.targets))
            for entropy, miss, row in zip(entropies, misses, chosen, strict=True)
        ]
        for number, (objective, values) in enumerate(zip(objectives, others, strict=True)):
            sums[number] += sum(values)
            counts[number] += objective.count(chosen)
        events.evaluation(name, len(losses), count)
        check_budget(meter, session.plan, f"{name} ended at row {len(losses)}")
        if stop is not None and stop.signal is not None and len(losses) < count:
            reason = signal.Signals(stop.signal).name
            raise InterruptedRunError(f"{reason}: {name} ended at row {len(losses)} of {count}")
    result = summarize(losses)
    for objective, total, divisor in zip(objectives, sums, counts, strict=True):
        result = msgspec.structs.replace(result, **objective.shown(total / divisor))
    return result


@dataclass
class LabelTally(LabelAccuracy):
    """The objective over labels, which also counts how often each is right, and is answered.

    Training raises the same share with `--objective labels`.
    """

    expected: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    def answers(self, sample: Scored) -> tuple[Ids, Ids]:
        expected, answered = super().answers(sample)
        self.expected += expected.tolist()
        self.answered += answered.tolist()
        return expected, answered

    def shown(self, mean: float) -> dict[str, float]:
        return {"label_accuracy": -mean}

    def summary(self, show: Callable[[Sequence[int]], str]) -> tuple[LabelShare, ...]:
        """Of each label its token, its text, and its shares of the rows.

        `show` is the tokenizer's text of tokens.
        """
        rows = len(self.expected)
        return tuple(
            LabelShare(
                token,
                show([token]),
                self.expected.count(token) / rows,
                self.answered.count(token) / rows,
            )
            for token in self.labels.tolist()
        )


def run_eval(config: EvalConfig, scratch: Path, events: Events) -> EvaluationResult:
    """`ondevice eval`: loss, perplexity, accuracy and, if asked for, labels, under a budget."""
    tally = None
    with Meter(budget_bytes=config.budget_bytes) as meter:
        adapter = None if config.adapter is None else Path(config.adapter)
        bundle = to_apply(
            adapter, open_checked(config.bundle, config.device, events.note), events.note
        )
        manifest = bundle.manifest
        source = TokenSource("eval.tokens", config.data, "valid", reading_of(config))
        max_seq_length = config.max_seq_length or source.bucket(bundle, scratch)
        plan = plan_evaluation(
            bundle, config.budget_bytes, max_seq_length, config.arithmetic, config.adapter_dtype
        )
        if plan.warning:
            events.note(warning(plan.warning))
        events.plan(plan)
        rows = source.rows(bundle, scratch, max_seq_length)
        if rows.report is not None:
            events.note(rows.report.describe(manifest.buckets))
        session = open_session(bundle, plan)
        adapters = Adapters.applied(manifest, adapter).in_dtype(config.adapter_dtype)
        if config.task == "labels":
            tally = LabelTally(labels_of(rows, "--task labels", "rows"))
        evaluation = evaluate_rows(
            session,
            adapters,
            rows,
            config.eval_rows,
            events,
            "evaluating",
            meter,
            objectives=[] if tally is None else [tally],
        )
        result = EvaluationResult(
            **msgspec.structs.asdict(evaluation),
            task=config.task,
            data=rows.report,
            budget_bytes=config.budget_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            peak_footprint_bytes=meter.peak_bytes,
            peak_rss_bytes=meter.peak_rss_bytes,
        )
    if tally is not None:  # the tokenizer names the labels once the footprint has been measured
        from runtime.data.text_encoder import load_encoder

        labels = tally.summary(load_encoder(bundle.path).show)
        return msgspec.structs.replace(result, labels=labels)
    return result
