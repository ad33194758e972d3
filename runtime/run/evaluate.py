"""Evaluation: loss, perplexity and accuracy of held-out rows, under a memory budget."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime.config.evaluate import EvalConfig
from runtime.core.errors import InterruptedRunError
from runtime.core.signals import Stop, cause
from runtime.data.source import TokenSource, reading_of
from runtime.data.token_rows import RandomRows, Rows
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
from runtime.parallel.exchange import Exchange
from runtime.parallel.workers import Workers, shares
from runtime.plan.plan import Plan
from runtime.plan.planner import Planner
from runtime.run.budget import (
    check_budget,
    evaluation,
    machine_for,
    plan_evaluation,
    plan_of_first,
)
from runtime.run.lora import to_apply
from runtime.run.processes import team_of
from runtime.run.results import Evaluation, EvaluationResult, Events, LabelShare
from runtime.run.session import Session, open_checked, open_session
from runtime.run.team import ADAPTER, Team, adapter_files


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
        loras = adapters.loras(model.blocks[0])
        xs = [model.embed(row.inputs, loras) for row in rows]
    for layer in visits(model):
        xs = model.forward_lanes(layer.block, xs, [adapters.loras(layer.block)] * len(rows))
    with visit(model, -1):
        hs = [model.hidden(xs.pop(0), row.scored) for row in rows]
        predictions = any(objective.predicts for objective in objectives)
        of_rows = [adapters.loras(model.blocks[-1])] * len(rows)
        scored = score(model, rows, hs, predictions=predictions, loras=of_rows)
        return [
            [objective.value(group) for group in grouped(scored, objective.together)]
            for objective in objectives
        ]


def _side_by_side(
    session: Session, rows: Rows, groups: Iterable[Sequence[int]]
) -> Iterator[tuple[Model, list[Row]]]:
    """The rows in order, those of one bucket that visit blocks together, by model.

    `groups` hold their numbers; those of a group are never parted.
    """
    waiting: list[Row] = []
    current: Model | None = None
    for numbers in groups:
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
    workers: Workers | None = None,
) -> Evaluation:
    """Evaluate the first `limit` rows (0: all, of random rows one): see `summarize`.

    Means of further `objectives` are added, as `Objective.shown` names them. Workers share the
    rows; their sums are added in the order of the rows, so that the result is that of one worker.

    Raises:
        BudgetError: the footprint has passed the meter's budget.
        InterruptedRunError: a signal has arrived in `stop`.
    """
    if not limit and isinstance(rows, RandomRows):
        limit = 1
    count = min(len(rows), limit) if limit else len(rows)
    together = math.lcm(*(objective.together for objective in objectives))
    workers = workers or Workers()
    exchange = workers.exchange
    groups = grouped(range(count), together)
    parts = shares(len(groups), workers.speeds or [1.0] * exchange.size)
    own = [groups[number] for number in parts[exchange.rank]]
    mine = sum(map(len, own))
    losses: list[StepLoss] = []
    numbers: list[list[float]] = [[] for _ in objectives]  # the summand of each group
    counts = [0] * len(objectives)
    for model, chosen in _side_by_side(session, rows, own):
        measured = (NextToken(), Accuracy(), *objectives)
        entropies, misses, *others = evaluate(model, adapters, chosen, measured)
        losses += [
            StepLoss(entropy, -round(miss), len(row.targets))
            for entropy, miss, row in zip(entropies, misses, chosen, strict=True)
        ]
        for number, (objective, values) in enumerate(zip(objectives, others, strict=True)):
            numbers[number] += values
            counts[number] += objective.count(chosen)
        events.evaluation(name, len(losses), mine)
        check_budget(meter, session.plan, f"{name} ended at row {len(losses)}")
        if stop is not None and stop.signal is not None and len(losses) < mine:
            reason = cause(stop.signal)
            raise InterruptedRunError(f"{reason}: {name} ended at row {len(losses)} of {mine}")
    sums = [(loss.loss_sum, loss.correct, loss.scored_tokens) for loss in losses]
    of_workers = [3 * sum(len(groups[number]) for number in part) for part in parts]
    everything = exchange.gather([float(number) for row in sums for number in row], of_workers)
    result = summarize(
        [
            StepLoss(entropy, round(correct), round(tokens))
            for entropy, correct, tokens in zip(*[iter(everything)] * 3, strict=True)
        ]
    )
    for objective, values, divisor in zip(objectives, numbers, counts, strict=True):
        total = sum(exchange.gather(values, [*map(len, parts)]))
        divisors = exchange.gather([float(divisor)], [1] * exchange.size)
        result = msgspec.structs.replace(result, **objective.shown(total / sum(divisors)))
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

    def gathered(self, exchange: Exchange) -> LabelTally:
        """The tally of all workers' rows, in their order."""
        counts = exchange.gather([float(len(self.expected))], [1] * exchange.size)
        expected, answered = (
            [round(token) for token in exchange.gather([*map(float, own)], [*map(round, counts)])]
            for own in (self.expected, self.answered)
        )
        return replace(self, expected=expected, answered=answered)

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


TOKENS, PLAN = "eval.tokens", "plan.json"


def run_eval(config: EvalConfig, events: Events) -> EvaluationResult:
    """`ondevice eval`: loss, perplexity, accuracy and, if asked for, labels, under a budget.

    Of several processes rank 0 sends the others its plan, the rows and the adapter.
    """
    same = {name: value for name, value in vars(config).items() if name != "bundle"}
    with (
        tempfile.TemporaryDirectory() as place,
        team_of(config.parallel, "eval", same) as team,
    ):
        scratch = Path(place)
        if not team.rank:
            return _evaluate(config, scratch, events, team)
        with team.receive(scratch / "received") as folder:
            received = {"data": folder / TOKENS, "adapter": folder / ADAPTER}
            there: dict[str, Any] = {
                name: str(path) for name, path in received.items() if path.exists()
            }
            return _evaluate(replace(config, **there), folder, Events(), team)


def _evaluate(config: EvalConfig, scratch: Path, events: Events, team: Team) -> EvaluationResult:
    """See `run_eval`; `scratch` holds what rank 0 has sent."""
    tally = None
    with Meter(budget_bytes=config.budget_bytes) as meter:
        adapter = None if config.adapter is None else Path(config.adapter)
        bundle = open_checked(config.bundle, config.device, events.note, team.size)
        bundle = to_apply(adapter, bundle, events.note)
        manifest = bundle.manifest
        source = TokenSource(TOKENS, config.data, "valid", reading_of(config))
        if team.rank:
            plan, max_seq_length = msgspec.json.decode(
                (scratch / PLAN).read_bytes(), type=tuple[Plan, int]
            )
            plan = plan_of_first(
                plan,
                Planner(manifest, machine_for(bundle, config.arithmetic)),
                evaluation(manifest, max_seq_length),
                config.budget_bytes,
            )
        else:
            max_seq_length = config.max_seq_length or source.bucket(
                bundle, scratch, events.evaluation
            )
            plan = plan_evaluation(bundle, config.budget_bytes, max_seq_length, config.arithmetic)
        events.announce(plan)
        rows = source.rows(bundle, scratch, max_seq_length, events.evaluation)
        if not team.rank:
            sent = {PLAN: msgspec.json.encode((plan, max_seq_length))}
            team.share({**sent, TOKENS: scratch / TOKENS, **adapter_files(adapter)})
        bundle = team.joined(bundle)
        if rows.report is not None:
            events.note(rows.report.describe(manifest.buckets))
        session = open_session(bundle, plan, note=events.note)
        adapters = Adapters.applied(manifest, adapter)
        if config.task == "labels":
            tally = LabelTally(labels_of(rows, "--task labels", "rows"))
        measured = evaluate_rows(
            session,
            adapters,
            rows,
            config.eval_rows,
            events,
            "evaluating",
            meter,
            objectives=[] if tally is None else [tally],
            workers=team.workers,
        )
        if tally is not None:
            tally = tally.gathered(team.workers.exchange)
        result = EvaluationResult(
            **msgspec.structs.asdict(measured),
            task=config.task,
            data=rows.report,
            budget_bytes=config.budget_bytes,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            peak_footprint_bytes=meter.peak_bytes,
            peak_rss_bytes=meter.peak_rss_bytes,
        )
    if tally is not None and not team.rank:
        # the tokenizer names the labels once the footprint has been measured
        from runtime.data.text_encoder import load_encoder

        labels = tally.summary(load_encoder(bundle.path).show)
        return msgspec.structs.replace(result, labels=labels)
    return result
