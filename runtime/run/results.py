"""Results of a run, an evaluation and a generation, and the events on the way.

The results are returned, printed and written as JSON. Nothing here imports MLX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from runtime.core.errors import BundleError
from runtime.core.notes import warning
from runtime.core.typed import decoded
from runtime.data.packing import PackingReport
from runtime.data.report import DataReport
from runtime.plan.plan import Plan

FORGOTTEN = 1.05  # a loss on other data that is so many times as high as before
FINAL_STEPS = 10  # whose mean is a run's final training loss

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training step, as a line of metrics.jsonl holds it.

    number: counted from 1.
    loss: the mean over the scored tokens before the update; None where it was not finite.
    scored_tokens: the tokens that have a loss. tokens: all that were processed.
    forward_passes: samples that were run forward for the objective.
    footprint_bytes: after the step. peak_footprint_bytes, peak_rss_bytes: so far.
    skipped: whether a loss was not finite, and nothing was learned.
    trained_loss: the mean of the loss that is trained, where it is not the cross entropy.
    objective, learned: the share of right answers where that is raised, and whether it has changed.
    gradient_norm: of all gradients, before they were clipped.
    sent_bytes: of the messages that each of several processes gave to the others.
    """

    number: _Count = msgspec.field(name="step")
    loss: float | None
    learning_rate: float
    scored_tokens: _Count
    tokens: _Count
    forward_passes: _Count
    seconds: _Seconds
    footprint_bytes: _Count
    peak_footprint_bytes: _Count
    peak_rss_bytes: _Count
    skipped: bool = False
    trained_loss: float | None = None
    objective: float | None = None
    learned: bool | None = None
    gradient_norm: float | None = None
    sent_bytes: _Count = 0


def read_steps(path: Path, steps: int, way_out: str) -> Iterator[Step]:
    """The lines of the first `steps` steps, each checked when it is read.

    Raises:
        BundleError: one is damaged or missing.
    """
    number = 0
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if number > steps:
                    return
                step = decoded(text, Step)
                if step.number != number:
                    raise BundleError(
                        f"{path} is damaged: line {number} is that of step {step.number}; {way_out}"
                    )
                yield step
    except (OSError, ValueError) as problem:
        raise BundleError(f"{path} is damaged in line {number}: {problem}; {way_out}") from None
    if number < steps:
        raise BundleError(f"{path} has {number} lines for {steps} steps; {way_out}")


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The loss of held-out rows, as evaluations.json holds it.

    loss: the mean over all scored tokens, in nats; None, as the perplexity, if it is not finite.
    rows_not_finite: how many rows make it so.
    accuracy: the share of scored tokens that are the most likely.
    exact: the share of rows of which all scored tokens are.
    step: for the evaluation after training, the steps that came before it.
    label_accuracy: of the task labels, the share of rows whose right label is the most likely.
    """

    loss: float | None
    perplexity: float | None
    rows_not_finite: int = 0
    accuracy: float
    exact: float
    scored_tokens: int
    rows: int
    step: int | None = None
    label_accuracy: float | None = None


class LabelShare(msgspec.Struct, frozen=True):
    """A label's token, its text, and the shares of rows that it is right for and answered in."""

    token: int
    text: str
    share: float
    answered: float


class EvaluationResult(Evaluation, frozen=True, kw_only=True, omit_defaults=True):
    """The result of `ondevice eval`.

    data: the report of the rows; None for random ones.
    labels: of the task labels.
    """

    task: str
    data: DataReport | None
    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int
    peak_rss_bytes: int
    labels: tuple[LabelShare, ...] = ()


Evaluations = Mapping[str, Evaluation]  # by "before", a step's number, or "after"
When = Annotated[str, msgspec.Meta(pattern=r"\A(before|after|[0-9]{1,19})\Z")]


class Best(msgspec.Struct, frozen=True):
    """The lowest held-out loss of a run, and after how many steps it was measured."""

    step: int
    loss: float


def final_loss(losses: Sequence[float]) -> float | None:
    """The mean of the last FINAL_STEPS of the losses (steps,), which one row does not decide.

    None without losses.
    """
    last = losses[-FINAL_STEPS:]
    return sum(last) / len(last) if last else None


def is_forgotten(before: float, after: float) -> bool:
    """Whether a loss on other data has risen by so much that the model is worse at them."""
    return after > FORGOTTEN * before


def loss_of(evaluation: Evaluation) -> float:
    """The held-out loss; infinity where it is not finite."""
    return math.inf if evaluation.loss is None else evaluation.loss


def losses_by_step(evaluations: Evaluations, done: int) -> dict[int, float]:
    """The held-out losses up to step `done`, in order; infinity for those that are not finite."""
    ends = {"before": 0, "after": done}
    losses = {}
    for when, evaluation in evaluations.items():
        losses[ends[when] if when in ends else int(when)] = loss_of(evaluation)
    return {step: losses[step] for step in sorted(losses) if step <= done}


def best_of(evaluations: Evaluations, done: int) -> Best | None:
    """The lowest loss, the first of equals; None where no finite loss is known."""
    losses = losses_by_step(evaluations, done)
    step = min(losses, key=losses.__getitem__, default=0)
    return Best(step, losses[step]) if losses.get(step, math.inf) < math.inf else None


def no_better_since(evaluations: Evaluations, done: int, min_delta: float) -> int:
    """How many evaluations came after the last that was better by more than `min_delta`.

    The first evaluation is better than none.
    """
    lowest, since = math.inf, -1
    for loss in losses_by_step(evaluations, done).values():
        since += 1
        if since == 0 or loss < lowest - min_delta:
            lowest, since = loss, 0
    return max(since, 0)


class TrainResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished run.

    stopped: why it is over: "steps", "seconds", "loss", "rise" or "patience".
    epochs: how often those have trained on all rows; None for random ones.
    skipped_steps: those without a finite loss. forward_passes: samples that were run forward.
    seconds: of all steps together.
    peak_footprint_bytes, peak_rss_bytes: of all processes that the run has had.
    sent_bytes_per_step: the mean of the steps that several processes shared; None without any.
    worker_peak_bytes: the peak footprints of the last processes by rank; empty if one trained.
    received_weight_bytes: of slices that others hold, which rank 0's last process has received.
    mlx_peak_bytes: the most that MLX had allocated in the last process.
    tokens_per_s: processed tokens for each second of training.
    final_train_loss: the mean of the last finite training losses, as `final_loss` says.
    trained: "lora", "prefix" or "full".
    evaluations: of held-out data, "before" training, after so many steps ("50"), and "after" it.
    others: of the data of `also_evaluate`, "before" and "after", by the data.
    best: the evaluation whose state `keep_best` has made the adapter; None without it.
    evaluations_no_better: how many came after the last one that was better.
    data: the report of each file's rows. packing: of the sequences of rows, with `pack`.
    machine: the device, the versions of libraries, and the BLAS.
    seconds_per_step, blocks: with `profile`, where the time and the memory went.
    """

    method: str
    steps: int
    stopped: str
    epochs: float | None
    skipped_steps: int
    forward_passes: int
    seconds: float
    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int
    peak_rss_bytes: int
    mlx_peak_bytes: int
    step_s_median: float | None
    tokens_per_s: float | None
    scored_tokens_per_s: float | None
    final_train_loss: float | None
    trainable_parameters: int
    trained: str | None
    lora: Mapping[str, Any]
    evaluations: Mapping[str, Evaluation] = msgspec.field(name="eval")
    others: Mapping[str, Mapping[str, Evaluation]] = msgspec.field(name="also_eval", default={})
    best: Best | None
    evaluations_no_better: int
    data: Mapping[str, DataReport]
    packing: PackingReport | None
    machine: Mapping[str, Any]
    seconds_per_step: Mapping[str, float] | None = None
    blocks: Sequence[Mapping[str, Any]] | None = None
    sent_bytes_per_step: int | None = None
    worker_peak_bytes: tuple[int, ...] = ()
    received_weight_bytes: int = 0

    @property
    def validation(self) -> Evaluation | None:
        """The evaluation after training; None without held-out data."""
        return self.evaluations.get("after")


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A continued prompt, or a message with its answer.

    text: the continuation alone.
    stopped: why it is over: "end" (the model's), "max_tokens" or "context"; else "".
    prompt_tokens_per_s: tokens of the prompt that were read each second.
    tokens_per_s: tokens generated each second after the first; None if there was no second.
    """

    prompt: str
    text: str
    prompt_tokens: int
    generated_tokens: int
    stopped: str
    prompt_tokens_per_s: float | None
    tokens_per_s: float | None
    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int


@dataclass
class Events:
    """The callbacks; each is optional.

    plan: receives the plan, once it is made. note: receives one line for people. step: receives a
    step and the number of all steps. evaluation: receives a name, the rows done, and the
    number of all rows. evaluated: receives when an evaluation was made ("before", a step's number,
    "after"), and its result. lengths: whether the notes on data count rows by their length.
    """

    plan: Callable[[Plan], None] = lambda plan: None
    note: Callable[[str], None] = lambda text: None
    step: Callable[[Step, int], None] = lambda step, total: None
    evaluation: Callable[[str, int, int], None] = lambda name, done, total: None
    evaluated: Callable[[str, Evaluation], None] = lambda when, evaluation: None
    lengths: bool = True

    def announce(self, plan: Plan) -> None:
        """Tell of the plan, and first of the limit under which the system may end the run."""
        if plan.warning:
            self.note(warning(plan.warning))
        self.plan(plan)
