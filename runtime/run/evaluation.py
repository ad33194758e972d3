"""What an evaluation finds: the loss of held-out rows, and for `ondevice eval` its task and memory.

Nothing here imports MLX.
"""

from __future__ import annotations

import msgspec

from runtime.data.report import DataReport


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The loss of held-out rows, as evaluations.json holds it.

    loss: the mean over all scored tokens, in nats; None, as the perplexity, if it is not finite.
    rows_not_finite: how many rows make it so.
    accuracy: the share of scored tokens that are the most likely.
    exact: the share of rows of which all scored tokens are.
    step: for the evaluation after training, the steps that came before it.
    trained_loss, objective, label_accuracy: means of further objectives that were measured: of a
    loss, of a share of right answers, and of rows whose right label is the most likely.
    """

    loss: float | None
    perplexity: float | None
    rows_not_finite: int = 0
    accuracy: float
    exact: float
    scored_tokens: int
    rows: int
    step: int | None = None
    trained_loss: float | None = None
    objective: float | None = None
    label_accuracy: float | None = None


class LabelShare(msgspec.Struct, frozen=True):
    """A label's token, its text, and the shares of rows that it is right for and answered in."""

    token: int
    text: str
    share: float
    answered: float


class EvaluationResult(Evaluation, frozen=True, kw_only=True, omit_defaults=True):
    """What `ondevice eval` has found.

    data: what became of the rows; None for random ones.
    labels: of the task labels.
    """

    task: str
    data: DataReport | None
    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int
    peak_rss_bytes: int
    labels: tuple[LabelShare, ...] = ()
