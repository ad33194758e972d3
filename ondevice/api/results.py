"""What the functions of the Python API return, and what their callbacks receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from runtime.adapters.lora import LoraSettings
    from runtime.bundle.quality import Quality
    from runtime.bundle.store import Bundle


@dataclass(frozen=True)
class Step:
    """A training step.

    number: counted from 1, of `steps` in all.
    loss: the mean over the scored tokens before the update; None if it was not finite.
    scored_tokens: the tokens that have a loss. tokens: all that were processed.
    seconds: what the step took.
    footprint_bytes: after the step. peak_footprint_bytes: so far.
    """

    number: int
    steps: int
    loss: float | None
    learning_rate: float
    scored_tokens: int
    tokens: int
    seconds: float
    footprint_bytes: int
    peak_footprint_bytes: int

    @classmethod
    def of(cls, entry: Mapping[str, Any], steps: int) -> Self:
        """The step of a line of metrics.jsonl."""
        return cls(
            number=entry["step"],
            steps=steps,
            loss=entry["loss"],
            learning_rate=entry["learning_rate"],
            scored_tokens=entry["tokens"],
            tokens=entry["processed_tokens"],
            seconds=entry["seconds"],
            footprint_bytes=entry["footprint_bytes"],
            peak_footprint_bytes=entry["peak_footprint_bytes"],
        )


@dataclass(frozen=True)
class Evaluation:
    """The loss of held-out rows.

    loss: the mean over all scored tokens, in nats; None, as the perplexity, if it is not finite.
    accuracy: the share of scored tokens that are the most likely.
    exact: the share of rows of which all scored tokens are.
    """

    loss: float | None
    perplexity: float | None
    accuracy: float
    exact: float
    tokens: int
    rows: int

    @classmethod
    def of(cls, found: Mapping[str, Any], **more: Any) -> Self:
        """The evaluation in a run's or a command's JSON."""
        known = [one.name for one in fields(Evaluation)]
        return cls(**{name: found[name] for name in known}, **more)


@dataclass(frozen=True)
class EvaluationResult(Evaluation):
    """An evaluation of its own, with its memory.

    notes: what was said, such as rows left out.
    label_accuracy: of the task labels, the share of rows whose right label is the most likely.
    labels: of that task, each label's token, its text, and its share of rows and of answers.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int
    notes: tuple[str, ...]
    label_accuracy: float | None = None
    labels: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class MemoryPlan:
    """How training would use a memory budget.

    minimum_bytes: the smallest budget that fits.
    limit_bytes: the memory limit of the container; None if there is none.
    bucket: the tokens to which rows are padded.
    kept_layers: layers whose activations are kept, not recomputed.
    materialized_layers: layers whose weights stay dequantized.
    scratch_disk_bytes: what training writes to scratch files.
    facts: everything, as `ondevice plan --json` prints it.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    minimum_bytes: int
    limit_bytes: int | None
    bucket: int
    kept_layers: int
    materialized_layers: int
    scratch_disk_bytes: int
    notes: tuple[str, ...]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, facts: Mapping[str, Any], notes: tuple[str, ...]) -> Self:
        """The plan in `ondevice plan`'s JSON."""
        known = [one.name for one in fields(cls) if one.name not in ("notes", "facts")]
        return cls(**{name: facts[name] for name in known}, notes=notes, facts=facts)


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    run: its folder, which `generate`, `evaluate` and `train` take as an adapter.
    adapter: the adapter's file; None if all parameters were trained.
    stopped: why it is over: "steps", "seconds", "loss", "rise" or "patience".
    final_loss: the last finite training loss.
    evaluations: of held-out data, "before" training, after so many steps ("50"), and "after" it.
    best_step: the step whose state `keep_best` has made the adapter; None without it.
    seconds: of all steps together. step_s: the median of one.
    tokens_per_s: processed tokens for each second of training.
    notes: what was said, such as rows left out, and warnings.
    summary: everything, as the run's summary.json holds it.
    """

    run: Path
    adapter: Path | None
    method: str
    steps: int
    stopped: str
    final_loss: float | None
    evaluations: Mapping[str, Evaluation]
    best_step: int | None
    trainable_parameters: int
    seconds: float
    step_s: float | None
    tokens_per_s: float | None
    budget_bytes: int
    predicted_peak_bytes: int
    peak_footprint_bytes: int
    notes: tuple[str, ...]
    summary: Mapping[str, Any]

    @property
    def validation(self) -> Evaluation | None:
        """The evaluation after training; None without held-out data."""
        return self.evaluations.get("after")

    @classmethod
    def of(
        cls, run: Path, adapter: Path | None, summary: Mapping[str, Any], notes: tuple[str, ...]
    ) -> Self:
        """The result of the run in a folder, from its summary."""
        best = summary["best"]
        return cls(
            run=run,
            adapter=adapter,
            method=summary["method"],
            steps=summary["steps"],
            stopped=summary["stopped"],
            final_loss=summary["final_train_loss"],
            evaluations={when: Evaluation.of(one) for when, one in summary["eval"].items()},
            best_step=None if best is None else best["step"],
            trainable_parameters=summary["trainable_parameters"],
            seconds=summary["seconds"],
            step_s=summary["step_s_median"],
            tokens_per_s=summary["tokens_per_s"],
            budget_bytes=summary["budget_bytes"],
            predicted_peak_bytes=summary["predicted_peak_bytes"],
            peak_footprint_bytes=summary["peak_footprint_bytes"],
            notes=notes,
            summary=summary,
        )


@dataclass(frozen=True)
class ExportResult:
    """An exported bundle.

    quality: how far its predictions are from the checkpoint's; None where it was not measured.
    """

    bundle: Bundle
    quality: Quality | None
    peak_footprint_bytes: int
    notes: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The bundle's folder."""
        return self.bundle.path


@dataclass(frozen=True)
class FuseResult:
    """A model with an adapter in its weights, written elsewhere.

    weights_bytes: of the files with the weights. adapted_matrices: those to which something was
    added. quality: compares it with the bundle and the adapter, whose loss is `source_loss`; None
    where it was not measured.
    """

    path: Path
    weights_bytes: int
    adapted_matrices: int
    quality: Quality | None
    peak_footprint_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class AdapterResult:
    """An adapter, written as another tool reads it.

    path: the folder, or for gguf the file. format: "peft", "gguf" or "mlx".
    tensors: how many there are. base_model: what its configuration calls the model.
    """

    path: Path
    format: str
    tensors: int
    base_model: str
    lora: LoraSettings
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Generation:
    """A continued prompt, or a message with its answer.

    text: the continuation alone.
    stopped: why it is over: "end" (the model's), "max_tokens" or "context".
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
    notes: tuple[str, ...]
