"""What a finished run was, as its summary.json holds it.

Nothing here imports MLX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runtime.data.packing import PackingReport
from runtime.data.report import DataReport
from runtime.run.best import Best
from runtime.run.evaluation import Evaluation


class TrainResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished run.

    stopped: why it is over: "steps", "seconds", "loss", "rise" or "patience".
    skipped_steps: those without a finite loss. forward_passes: samples that were run forward.
    seconds: of all steps together.
    peak_footprint_bytes, peak_rss_bytes: of all processes that the run has had.
    mlx_peak_bytes: the most that MLX had allocated in the last process.
    tokens_per_s: processed tokens for each second of training.
    final_train_loss: the last finite training loss.
    trained: "lora", "prefix" or "full".
    evaluations: of held-out data, "before" training, after so many steps ("50"), and "after" it.
    best: the evaluation whose state `keep_best` has made the adapter; None without it.
    evaluations_no_better: how many came after the last one that was better.
    data: what became of the rows of each file. packing: of the sequences of rows, with `pack`.
    machine: the device, the versions of libraries, and the BLAS.
    seconds_per_step, blocks: with `profile`, where the time and the memory went.
    """

    method: str
    steps: int
    stopped: str
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
    best: Best | None
    evaluations_no_better: int
    data: Mapping[str, DataReport]
    packing: PackingReport | None
    machine: Mapping[str, Any]
    seconds_per_step: Mapping[str, float] | None = None
    blocks: Sequence[Mapping[str, Any]] | None = None

    @property
    def validation(self) -> Evaluation | None:
        """The evaluation after training; None without held-out data."""
        return self.evaluations.get("after")
