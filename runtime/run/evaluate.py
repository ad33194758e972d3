"""Evaluation: loss, perplexity and accuracy of held-out rows, under a budget like all else."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.bundle.store import Bundle
from ondevice.config.evaluate import EvalConfig
from ondevice.errors import BudgetError, InterruptedRunError
from ondevice.units import format_bytes
from runtime.data.rows import RandomRows, Rows, TokenRows, prepare_tokens, random_seed
from runtime.engine.kernels.head import HeadResult
from runtime.engine.program import Program
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Row, StepLoss
from runtime.planner.plan import Plan
from runtime.run.open import Session, open_checked, open_session, plan_for
from runtime.run.signals import Stop
from runtime.system.footprint import Meter
from runtime.system.heap import trim_heap

RANDOM_ROWS = 1 << 16  # how many rows `random:SEED` stands for


@dataclass
class Events:
    """What the caller wants to see while a run goes on; every hook may be left alone."""

    plan: Callable[[Plan], None] = lambda plan: None
    note: Callable[[str], None] = lambda text: None
    step: Callable[[dict[str, Any], int], None] = lambda entry, total: None
    evaluation: Callable[[str, int, int], None] = lambda what, done, total: None


def summarize(losses: Sequence[StepLoss]) -> dict[str, Any]:
    """Loss, perplexity and next-token accuracy over rows; `exact` is the share all right."""
    total = sum(losses, StepLoss(0.0, 0, 0))
    loss = total.loss_sum / total.tokens
    return {
        "loss": loss,
        "perplexity": float(np.exp(min(loss, 700.0))),
        "accuracy": total.correct / total.tokens,
        "exact": sum(one.correct == one.tokens for one in losses) / len(losses),
        "tokens": total.tokens,
        "rows": len(losses),
    }


def evaluate(program: Program, adapters: Adapters, rows: Sequence[Row]) -> list[StepLoss]:
    """Loss and accuracy of each row, forward only; all rows visit each block side by side."""
    xs = [program.embed(row.inputs) for row in rows]
    program.release(program.blocks[0])
    for index, block in enumerate(program.blocks[1:-1], start=1):
        program.read_ahead(program.blocks[index + 1])
        xs = program.forward_lanes(block, xs, [adapters.loras(block)] * len(rows))
        program.release(block)
    hs = [program.hidden(xs.pop(0), row.scored) for row in rows]
    found = program.losses(hs, [row.targets for row in rows], gradient=False, predictions=True)
    program.release(program.blocks[-1])
    return [_count(one, row) for one, row in zip(found, rows, strict=True)]


def _count(found: HeadResult, row: Row) -> StepLoss:
    assert found.predicted is not None
    right = found.predicted == mx.array(row.targets.astype("int32"))
    loss = float(found.loss.sum().item())  # type: ignore[arg-type]
    return StepLoss(loss, int(right.sum().item()), len(row.targets))  # type: ignore[arg-type]


def _side_by_side(session: Session, rows: Rows, count: int) -> Iterator[list[Row]]:
    """The first `count` rows in order, in groups of one bucket that the plan lets travel together."""
    group: list[Row] = []
    for index in range(count):
        row = Row(*rows.row(index))
        if group and (
            len(group) == session.plan.eval_lanes
            or session.program(len(row.inputs)) is not session.program(len(group[0].inputs))
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
) -> dict[str, Any]:
    """Evaluate the first `limit` rows (0: all, of random rows one).

    Raises:
        BudgetError: the footprint has passed the meter's budget.
        InterruptedRunError: a signal has arrived in `stop`.
    """
    if not limit and isinstance(rows, RandomRows):
        limit = 1
    count = min(len(rows), limit) if limit else len(rows)
    losses: list[StepLoss] = []
    for group in _side_by_side(session, rows, count):
        losses += evaluate(session.program(len(group[0].inputs)), adapters, group)
        events.evaluation(what, len(losses), count)
        check_budget(meter, session.plan, f"{what} ended at row {len(losses)}")
        if stop is not None and stop.signal is not None and len(losses) < count:
            name = signal.Signals(stop.signal).name
            raise InterruptedRunError(f"{name}: {what} ended at row {len(losses)} of {count}")
    return summarize(losses)


def check_budget(meter: Meter, plan: Plan, state: str) -> None:
    """Keep the promise: raise BudgetError once the footprint has passed the budget."""
    if meter.over_budget:
        raise BudgetError(
            f"the run passed its budget: footprint {format_bytes(meter.peak_bytes, up=True)} > "
            f"{format_bytes(plan.budget_bytes)} (predicted "
            f"{format_bytes(plan.predicted_peak_bytes)}); {state}"
        )


def open_rows(bundle: Bundle, data: str, split: str, length: int, folder: Path, name: str) -> Rows:
    """The rows of `data`: tokenized in another process into `folder / name`, or random."""
    if (seed := random_seed(data)) is not None:
        return RandomRows(seed, bundle.manifest.vocab_size, length, RANDOM_ROWS)
    path = prepare_tokens(bundle.path, data, split, length, folder / name)
    return TokenRows(path, bundle.manifest.vocab_size)


def run_eval(config: EvalConfig, scratch: Path, events: Events) -> dict[str, Any]:
    """`ondevice eval`: loss, perplexity and accuracy under a budget."""
    with Meter(budget_bytes=config.budget_bytes, relieve=trim_heap) as meter:
        bundle = open_checked(config.bundle)
        plan = plan_for(
            bundle,
            config.budget_bytes,
            config.max_seq_length,
            config.arithmetic,
            method="eval",
            adapter_dtype=config.adapter_dtype,
        )
        events.plan(plan)
        meter.aim(plan.predicted_peak_bytes)
        rows = open_rows(
            bundle, config.data, "valid", config.max_seq_length, scratch, "eval.tokens"
        )
        session = open_session(bundle, plan)
        adapters = _adapters_for_eval(bundle, config.adapter).lent_as(config.adapter_dtype)
        result = evaluate_rows(
            session, adapters, rows, config.eval_rows, events, "evaluating", meter
        )
        return {
            **result,
            "budget_bytes": config.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "peak_footprint_bytes": meter.peak_bytes,
            "peak_rss_bytes": meter.peak_rss_bytes,
        }


def _adapters_for_eval(bundle: Bundle, adapter: str | None) -> Adapters:
    if adapter is None:
        return Adapters(replace(bundle.manifest, lora={**bundle.manifest.lora, "targets": []}), {})
    return Adapters.load(bundle.manifest, Path(adapter))
