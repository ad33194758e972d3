"""The options of the API's functions as keywords with types, for editors and type checkers.

They are the fields of the commands' configurations in `runtime.config`, which has their defaults,
their checks and what they mean; fields that are paths may also be a `Path`. This file is written
from them: python -m tests.support.keywords
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict


class DataKeywords(TypedDict, total=False):
    """Which rows there are, and which tokens have a loss."""

    loss_on: str
    columns: str | None
    skip_bad_rows: bool


class BundleKeywords(TypedDict, total=False):
    """The memory budget, the length of rows, and the device."""

    budget: str
    max_seq_length: int | None
    device: str
    arithmetic: str


class LoraKeywords(TypedDict, total=False):
    """Settings of adapters."""

    lora_rank: int | None
    lora_alpha: float | None
    lora_targets: str | None
    lora_layers: int | None
    rslora: bool | None


class ZerothOrderKeywords(TypedDict, total=False):
    """Options of methods that see losses only."""

    queries: int | None
    objective: str | None
    zo_optimizer: str | None
    zo_window: int | None
    zo_scaling: str | None
    zo_scaled: str | None
    zo_scaling_interval: int | None
    seed_pool: int | None
    hessian_smoothing: float | None


class StepKeywords(BundleKeywords, LoraKeywords, ZerothOrderKeywords, total=False):
    """Options of a step on which its memory depends."""

    method: str
    pack: bool
    batch_size: int
    grad_accumulation: int
    optimizer: str
    max_grad_norm: float
    adapter: str | Path | None
    lora_dropout: float | None
    trainable: str | None
    prefix_length: int | None
    rounding: str | None
    plan: str
    prefetch: bool
    adapter_dtype: str


class PlanKeywords(StepKeywords, total=False):
    """The options of `plan`."""

    machine: str | Path | None


class TrainKeywords(StepKeywords, DataKeywords, total=False):
    """The options of `train`."""

    output: str | Path
    valid_split: str | None
    profile: bool
    report_to: str
    machine: str | Path | None
    steps: int
    learning_rate: float
    lr_schedule: str
    warmup_steps: int
    weight_decay: float
    seed: int
    epsilon: float
    noise: str
    eval_data: str | Path | None
    eval_every: int
    eval_rows: int
    keep_best: bool
    keep: int
    patience: int
    min_delta: float
    save_every: int
    stop_seconds: float
    stop_loss: float
    stop_rise: float


class EvaluateKeywords(BundleKeywords, DataKeywords, total=False):
    """The options of `evaluate`."""

    adapter: str | Path | None
    task: str
    eval_rows: int
    adapter_dtype: str


class ExportKeywords(DataKeywords, total=False):
    """The options of `export_bundle`."""

    force: bool
    seed: int
    bits: int | str | None
    embedding_bits: int | None
    group_size: int
    layout: str
    eight_bit: str
    size: str
    calibrate: str | Path | None
    calibration_tokens: int
    quality: bool
    graphs: bool
    trainable: str
    storage: str
    budget: str
    lora_rank: int
    lora_alpha: float
    lora_targets: str
    seq_lens: Sequence[int]
    device: str


class GenerateKeywords(TypedDict, total=False):
    """The options of `generate`."""

    adapter: str | Path | None
    max_tokens: int
    system: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    budget: str
    device: str
    chat: bool


class ChatKeywords(TypedDict, total=False):
    """The options of `chat`."""

    adapter: str | Path | None
    max_tokens: int
    system: str | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    budget: str
    device: str
    context: int


class AdapterKeywords(TypedDict, total=False):
    """The options of `adapter`."""

    bundle: str | Path | None
    base_model: str | None
    force: bool


class SourceKeywords(BundleKeywords, DataKeywords, total=False):
    """The options of `compare_with_source`."""

    eval_rows: int


class FuseKeywords(DataKeywords, total=False):
    """The options of `fuse`."""

    adapter: str | Path | None
    format: str
    force: bool
    dtype: str
    bits: int | None
    shard_size: str
    quality: bool
    data: str | Path | None
    eval_rows: int
    max_seq_length: int | None
    budget: str
    device: str
