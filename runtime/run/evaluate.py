"""Evaluation: loss, perplexity and accuracy of held-out rows, under a memory budget."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import msgspec
import numpy as np

from runtime.config.evaluate import EvalConfig
from runtime.core.errors import InterruptedRunError
from runtime.core.notes import warning
from runtime.data.reading import reading_of
from runtime.data.rows import RandomRows, Rows
from runtime.data.source import Source
from runtime.engine.model import Model
from runtime.engine.sample import Row
from runtime.machine.footprint import Meter
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import StepLoss
from runtime.operations.head_kernel import HeadResult
from runtime.run.budget import check_budget, plan_evaluation
from runtime.run.events import Events
from runtime.run.lora import to_apply
from runtime.run.open import Session, open_checked, open_session
from runtime.run.signals import Stop

if TYPE_CHECKING:  # training does not count labels
    from runtime.run.label_tally import LabelTally


def summarize(losses: Sequence[StepLoss]) -> dict[str, Any]:
    """Loss, perplexity and next-token accuracy over rows; `exact` is the share of perfect rows.

    A loss that is not finite is None, as its perplexity; then `rows_not_finite` counts its rows.
    """
    total = sum(losses, StepLoss(0.0, 0, 0))
    loss = total.loss_sum / total.tokens
    finite = math.isfinite(loss)
    bad = sum(not math.isfinite(one.loss_sum) for one in losses)
    return {
        "loss": loss if finite else None,
        "perplexity": float(np.exp(min(loss, 700.0))) if finite else None,
        **({} if finite else {"rows_not_finite": bad}),
        "accuracy": total.correct / total.tokens,
        "exact": sum(one.correct == one.tokens for one in losses) / len(losses),
        "tokens": total.tokens,
        "rows": len(losses),
    }


def evaluate(
    model: Model, adapters: Adapters, rows: Sequence[Row], tally: LabelTally | None = None
) -> list[StepLoss]:
    """Loss and accuracy of each row, forward only; all rows visit each block together.

    A `tally` of labels counts the rows too.
    """
    xs = [model.embed(row.inputs) for row in rows]
    model.release(model.blocks[0])
    for index, block in enumerate(model.blocks[1:-1], start=1):
        model.read_ahead(model.blocks[index + 1])
        xs = model.forward_lanes(block, xs, [adapters.loras(block)] * len(rows))
        model.release(block)
    hs = [model.hidden(xs.pop(0), row.scored) for row in rows]
    found = model.losses(hs, [row.targets for row in rows], gradient=False, predictions=True)
    if tally is not None:
        tally.add(model, hs, rows)
    model.release(model.blocks[-1])
    return [_count(one, row) for one, row in zip(found, rows, strict=True)]


def _count(found: HeadResult, row: Row) -> StepLoss:
    assert found.predicted is not None
    right = found.predicted == mx.array(row.targets.astype("int32"))
    loss = float(found.loss.sum().item())  # type: ignore[arg-type]
    return StepLoss(loss, int(right.sum().item()), len(row.targets))  # type: ignore[arg-type]


def _side_by_side(session: Session, rows: Rows, count: int) -> Iterator[list[Row]]:
    """The first `count` rows in order, in groups of one bucket that visit blocks together."""
    group: list[Row] = []
    for index in range(count):
        row = Row(*rows.row(index))
        if group and (
            len(group) == session.plan.evaluation_lanes
            or session.model(len(row.inputs)) is not session.model(len(group[0].inputs))
        ):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def evaluate_rows(
    session: Session,
    adapters: Adapters,
    rows: Rows,
    limit: int,
    events: Events,
    what: str,
    meter: Meter,
    stop: Stop | None = None,
    tally: LabelTally | None = None,
) -> dict[str, Any]:
    """Evaluate the first `limit` rows (0: all, of random rows one), and `tally` their labels.

    Raises:
        BudgetError: the footprint has passed the meter's budget.
        InterruptedRunError: a signal has arrived in `stop`.
    """
    if not limit and isinstance(rows, RandomRows):
        limit = 1
    count = min(len(rows), limit) if limit else len(rows)
    losses: list[StepLoss] = []
    for group in _side_by_side(session, rows, count):
        losses += evaluate(session.model(len(group[0].inputs)), adapters, group, tally)
        events.evaluation(what, len(losses), count)
        check_budget(meter, session.plan, f"{what} ended at row {len(losses)}")
        if stop is not None and stop.signal is not None and len(losses) < count:
            name = signal.Signals(stop.signal).name
            raise InterruptedRunError(f"{name}: {what} ended at row {len(losses)} of {count}")
    return summarize(losses)


def run_eval(config: EvalConfig, scratch: Path, events: Events) -> dict[str, Any]:
    """`ondevice eval`: loss, perplexity, accuracy and, if asked for, labels, under a budget."""
    tally = None
    with Meter(budget_bytes=config.budget_bytes) as meter:
        adapter = None if config.adapter is None else Path(config.adapter)
        bundle = to_apply(
            adapter, open_checked(config.bundle, config.device, events.note), events.note
        )
        manifest = bundle.manifest
        source = Source("eval.tokens", config.data, "valid", reading_of(config))
        length = config.max_seq_length or source.length(bundle, scratch)
        plan = plan_evaluation(
            bundle, config.budget_bytes, length, config.arithmetic, config.adapter_dtype
        )
        if plan.warning:
            events.note(warning(plan.warning))
        events.plan(plan)
        rows = source.rows(bundle, scratch, length)
        if rows.report is not None:
            events.note(rows.report.describe(manifest.buckets))
        session = open_session(bundle, plan)
        adapters = Adapters.applied(manifest, adapter).in_dtype(config.adapter_dtype)
        if config.task == "labels":
            from runtime.methods.objectives import labels_of
            from runtime.run.label_tally import LabelTally

            tally = LabelTally(labels_of(rows, "--task labels", "rows"))
        result = evaluate_rows(
            session, adapters, rows, config.eval_rows, events, "evaluating", meter, tally=tally
        )
        measured = {
            "data": msgspec.to_builtins(rows.report, str_keys=True),
            "budget_bytes": config.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "peak_footprint_bytes": meter.peak_bytes,
            "peak_rss_bytes": meter.peak_rss_bytes,
        }
    if tally is not None:  # the tokenizer names the labels once the footprint has been measured
        from runtime.data.text_encoder import load_encoder

        result |= tally.summary(load_encoder(bundle.path).show)
    return {"task": config.task, **result, **measured}
