"""Options that several commands share: bundle, memory budget, and the size of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.adapters.lora import MOST_PREFIX
from runtime.config.base import (
    COUNT,
    FILLED,
    SIZE,
    Config,
    Group,
    between,
    choice,
    expanded,
    flag,
    option,
    readable,
    refuse,
    required,
    up_to,
)
from runtime.config.lora import LoraOptions, option_of
from runtime.config.methods import METHODS, OBJECTIVES, OPTIONS_OF
from runtime.config.zeroth_order import USUAL_POOL, ZerothOrderOptions
from runtime.core.units import parse_bytes

DEVICES = ("auto", "cpu", "gpu")
DATA_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
DATA_FILE = f"a {', '.join(DATA_SUFFIXES[:-1])} or {DATA_SUFFIXES[-1]} file"
HUB_DATA = "a Hugging Face dataset id (OWNER/NAME[:CONFIG[:SPLIT]])"
TRAIN_DATA = (
    f"training data: {DATA_FILE}, a folder with train and valid, {HUB_DATA}, or random:SEED"
)
MOST_ROWS, MOST_BATCHES = 1024, 1 << 16  # of a step
MOST_TOGETHER = 1 << 20  # the product of these and the queries: forward passes, and slots on disk
STORED = ("lora", "full")  # the kinds of training for which bundles are exported
TRAINABLE = (*STORED, "prefix")
_IMPROVED = "; ".join(f"{name}, {entry.improves}" for name, entry in OBJECTIVES.items())
USUAL_PREFIX = 5  # rows of a prefix: those of MeZO's paper
FIELDS = (
    *("messages", "conversations", "tools", "system", "prompt", "completion", "text"),
    *("instruction", "input", "output"),
)
"""The fields of a row of data that are recognised."""


def bundle_field() -> Any:
    """The field for the bundle that a command uses."""
    return required("bundle directory, written by `ondevice export`", "BUNDLE")


def device_field() -> Any:
    """The field for the device that a command computes on."""
    return choice(
        "auto",
        "device to compute on (auto: the one that the bundle was exported for, or MLX's default "
        "where the bundle comes from another machine)",
        *DEVICES,
        group=Group.MEMORY,
    )


def length_field(group: Group, rows: str = "", *, aliases: tuple[str, ...] = ("--seq-len",)) -> Any:
    """The field for the length at which rows are cut."""
    return option(
        None,
        f"tokens to predict per row{rows}; longer rows are cut (default: the shortest of the "
        "bundle's lengths that holds every row; for text, its longest up to 256)",
        COUNT,
        group,
        aliases=aliases,
    )


ADAPTER = "a run, an adapter folder (ours, PEFT's or mlx-lm's), or its .safetensors file"


def adapter_field(text: str = f"adapter to apply: {ADAPTER} (default: the base model)") -> Any:
    """The field for a trained LoRA adapter."""
    return option(None, text, FILLED, metavar="PATH")


def columns_of(text: str | None) -> dict[str, str]:
    """Our names of fields and those in the data, of "prompt=question,completion=answer".

    Raises ValueError if a part is not of that form, or names no field of ours, or one twice.
    """
    if text is None:
        return {}
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    columns = {ours.strip(): theirs.strip() for ours, theirs in pairs}
    if len(columns) < len(pairs) or not set(columns) <= set(FIELDS) or not all(columns.values()):
        raise ValueError(text)
    return columns


def share_of(text: str) -> float:
    """The share in "5%" or "0.05". Raises ValueError if it is not between 0 and 1."""
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < share < 1:
        raise ValueError(text)
    return share


def mix_of(text: str) -> tuple[str, float]:
    """The data and share in "general.jsonl:10%". Raises ValueError if it is not of that form."""
    data, _, share = text.rpartition(":")
    if not data.strip():
        raise ValueError(text)
    return data, share_of(share)


_COLUMNS = readable(
    columns_of,
    f"pairs such as prompt=question,completion=answer, of {', '.join(FIELDS)}, each once",
)
_SHARE = readable(share_of, "a share such as 5%, above 0% and below 100%")
_MIX = readable(mix_of, "data and a share below 100%, such as general.jsonl:10%", expanded)


def mix_field() -> Any:
    """The field for other data whose rows are added."""
    return option(
        None,
        "other data of which rows are added, drawn by --seed: general.jsonl:10% adds a tenth as "
        "many as --data has, so that less of what the model knew is forgotten",
        _MIX,
        Group.DATA,
        metavar="DATA:SHARE",
    )


def trainable_field() -> Any:
    """The field for the values that are trained."""
    return choice(
        None,
        "what is trained: adapters (lora); further keys and values of every attention (prefix); or "
        "all parameters (full), for which the bundle stores floats (default: what the bundle was "
        "exported for)",
        *TRAINABLE,
        group=Group.TRAINING,
    )


def prefix_length_field() -> Any:
    """The field for how many keys and values of every attention are trained."""
    return option(
        None,
        "with --trainable prefix: how many keys and values of every attention are trained "
        f"(default: {USUAL_PREFIX}, or as many as the adapter to start from has)",
        up_to(MOST_PREFIX),
        Group.TRAINING,
    )


def valid_split_field() -> Any:
    """The field for the share of the data that is held out."""
    return option(
        None,
        "share of the rows to hold out as validation data, such as 5%, where there is none",
        _SHARE,
        Group.DATA,
        metavar="SHARE",
    )


def pack_field() -> Any:
    """The field for packing short rows together."""
    return option(
        False,
        "train on sequences of several short rows, of which none attends to another; they have the "
        "bundle's length for --max-seq-length, else its longest up to 256, or what rows need",
        group=Group.DATA,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Config):
    """The memory budget of a command."""

    budget: str = option(
        "1GB",
        "memory footprint that the process may reach, such as 300MB or 512MiB",
        SIZE,
        Group.MEMORY,
        metavar="SIZE",
    )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""
        return parse_bytes(self.budget)


@dataclass(frozen=True, kw_only=True)
class DataOptions(Config):
    """Options of commands that read data: which rows there are, and which tokens have a loss."""

    loss_on: str = choice(
        "assistant",
        "tokens that have a loss: of messages every answer (assistant), the last one (last), or "
        "all; of prompts with completions the completion, or all; of text always all",
        "assistant",
        "last",
        "all",
        group=Group.DATA,
    )
    columns: str | None = option(
        None,
        "fields to read other fields from, such as prompt=question,completion=answer",
        _COLUMNS,
        Group.DATA,
        metavar="OURS=THEIRS,...",
    )
    skip_bad_rows: bool = option(
        False, "leave out rows that cannot be read, and count them", group=Group.DATA
    )
    keep_empty: bool = option(
        False, "learn answers without text, which are else left out and counted", group=Group.DATA
    )


@dataclass(frozen=True, kw_only=True)
class BundleConfig(BudgetOptions):
    """Options of commands that use a bundle under a memory budget."""

    bundle: str = bundle_field()
    max_seq_length: int | None = length_field(Group.MEMORY)
    device: str = device_field()
    arithmetic: str = choice(
        "auto",
        "multiply quantized weights as they are (packed), or dequantized tiles (unpacked); "
        "auto: packed on a GPU, unpacked on a CPU",
        "auto",
        "packed",
        "unpacked",
        group=Group.MEMORY,
    )


@dataclass(frozen=True, kw_only=True)
class StepConfig(BundleConfig, LoraOptions, ZerothOrderOptions):
    """Options of a training step on which its memory depends."""

    method: str = choice(
        "mebp",
        "exact gradients (mebp), or estimates from forward passes only (mezo, or its variants)",
        *METHODS,
        group=Group.TRAINING,
    )
    objective: str = choice(
        next(iter(OBJECTIVES)),
        f"what training improves: {_IMPROVED}; shares have no gradient, are for zeroth-order "
        "methods, and need large batches",
        *OBJECTIVES,
        group=Group.TRAINING,
    )
    compute_dtype: str = choice(
        "float32",
        "what products with frozen weights are computed in, with sums and all else in float32, "
        "but hidden values on a GPU; bfloat16 needs a GPU, or a processor with AVX512-BF16; auto: "
        "bfloat16 where it is faster",
        "float32",
        "bfloat16",
        "auto",
        group=Group.MEMORY,
    )
    pack: bool = pack_field()
    batch_size: int = option(
        1, "rows per batch; with --pack sequences of rows", up_to(MOST_ROWS), Group.TRAINING
    )
    grad_accumulation: int = option(
        1,
        "batches whose gradients are accumulated per step",
        up_to(MOST_BATCHES),
        Group.TRAINING,
    )
    optimizer: str = choice("adamw", "optimizer of mebp", "adamw", "sgd", group=Group.TRAINING)
    max_grad_norm: float = option(
        0.0,
        "largest norm of all gradients together, beyond which they are scaled down; 0 for no "
        "limit; with mebp only",
        between(1e-6, 1e6, "usual is 1", or_zero=True),
        Group.TRAINING,
    )
    adapter: str | None = adapter_field(f"adapter to start from: {ADAPTER} (default: new adapters)")
    lora_dropout: float | None = option(
        None,
        "probability of dropping a value of an adapter's input while training; with mebp only "
        "(default: that of the adapter to start from, else 0)",
        between(0, 0.99, "usual are 0 to 0.1"),
        Group.LORA,
    )
    trainable: str | None = trainable_field()
    prefix_length: int | None = prefix_length_field()

    @property
    def trains_prefix(self) -> bool:
        """Whether a prefix is trained, in place of LoRA adapters."""
        return self.trainable == "prefix"

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained, in place of adapters."""
        return self.trainable == "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        together = self.batch_size * self.grad_accumulation * self.directions
        if together > MOST_TOGETHER:
            problem = (
                f"batch_size {self.batch_size} x grad_accumulation {self.grad_accumulation} x "
                f"queries {self.directions} is {together}; a step can have {MOST_TOGETHER} at most"
            )
            refuse(type(self), [problem])
        problems = [
            f"{name} is an option of {' and '.join(', '.join(methods).rsplit(', ', 1))}, not of "
            f"{self.method}"
            for name, methods in OPTIONS_OF.items()
            if self.was_given(name) and self.method not in methods
        ]
        if self.trains_prefix and (given := self.lora_flags):
            problems.append(
                f"trainable prefix has no LoRA adapters: leave out {' and '.join(given)}, or give "
                "--trainable lora"
            )
        if self.prefix_length is not None and self.trainable in ("lora", "full"):
            problems.append(
                f"prefix_length {self.prefix_length} has no effect with trainable {self.trainable}"
            )
        refuse(type(self), [*problems, *self.zeroth_order_problems])

    @property
    def lora_flags(self) -> list[str]:
        """The options of LoRA that were given, as they are typed."""
        flags = [flag(option_of(name)) for name in self.given_lora]
        return [*flags, "--lora-dropout"] if self.lora_dropout else flags

    @property
    def directions(self) -> int:
        """The random directions of a step, for methods that perturb."""
        return METHODS[self.method].queries if self.queries is None else self.queries

    @property
    def pool(self) -> int:
        """How many directions there are in all, for methods with a pool of them; else 0."""
        usual = USUAL_POOL if "seed_pool" in METHODS[self.method].options else 0
        return self.seed_pool or usual
