"""The options of `ondevice fuse` and `ondevice adapter`, which write for other tools."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from export.config.export import BITS, STORAGE
from runtime.config.base import (
    FILLED,
    NAME,
    NOT_NEGATIVE,
    SIZE,
    Check,
    Config,
    Group,
    choice,
    option,
    output_option,
    refuse,
    required,
)
from runtime.config.shared import (
    DATA_FILE,
    HUB_DATA,
    BudgetOptions,
    DataOptions,
    adapter_field,
    bundle_field,
    device_field,
    length_field,
)
from runtime.core.units import parse_bytes

FORMATS = ("peft", "gguf", "mlx")


@dataclass(frozen=True, kw_only=True)
class FuseConfig(DataOptions, BudgetOptions):
    """The options of `ondevice fuse`, which adds an adapter to the weights of its bundle."""

    bundle: str = bundle_field()
    adapter: str | None = adapter_field(
        "adapter to add: a run, an adapter directory or its .safetensors file (default: none, the "
        "bundle's own weights are converted)"
    )
    output: str = output_option(
        MISSING, "directory to write; with --format gguf a directory, or a NAME.gguf", "DIR"
    )
    format: str = choice(
        "hf",
        "what to write: a checkpoint for transformers and mlx-lm (hf), a file for llama.cpp "
        "(gguf), or a bundle again (bundle)",
        "hf",
        "gguf",
        "bundle",
    )
    force: bool = option(False, "replace what an earlier fuse has written there")
    dtype: str = choice(
        "bfloat16",
        "type of the weights in a checkpoint or GGUF file; float16 rounds less, but takes no "
        "values above 65504",
        *STORAGE,
    )
    bits: int | None = choice(
        None,
        "with --format bundle: bits per weight of all matrices, quantized (4, 8) or floats (16, "
        "32); without it each matrix is stored as before",
        *BITS,
    )
    shard_size: str = option(
        "5GB", "with --format hf: the largest weight file, such as 2GB", SIZE, metavar="SIZE"
    )
    quality: bool = option(
        True,
        "measure the loss before and after fusing",
        group=Group.EVALUATION,
    )
    data: str | None = option(
        None,
        f"held-out data to measure with: {DATA_FILE}, a folder with valid, {HUB_DATA}, or "
        "random:SEED (default: a short text that comes with the program)",
        FILLED,
        Group.EVALUATION,
        metavar="DATA",
    )
    eval_rows: int = option(
        16, "rows of --data to measure with; 0 for all", NOT_NEGATIVE, Group.EVALUATION
    )
    max_seq_length: int | None = length_field(Group.EVALUATION, " of --data")
    device: str = device_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        formats = {"bits": ("bundle",), "shard_size": ("hf",), "dtype": ("hf", "gguf")}
        problems = [
            f"{name} has no effect with format {self.format}; it is an option of "
            f"{' and '.join(which)}"
            for name, which in formats.items()
            if self.format not in which and self.was_given(name)
        ]
        problems += [
            f"{name} has no effect without data, to whose rows it applies"
            for name in (
                "eval_rows",
                "max_seq_length",
                "columns",
                "loss_on",
                "skip_bad_rows",
                "keep_empty",
            )
            if self.data is None and self.was_given(name)
        ]
        if self.data is not None and not self.quality:
            problems.append("data has no effect with --no-quality")
        refuse(type(self), problems)

    @property
    def shard_bytes(self) -> int:
        """The most bytes of a weight file."""
        return parse_bytes(self.shard_size)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Config):
    """The options of `ondevice adapter`, which writes an adapter as other tools read it."""

    positional: ClassVar[str] = "run"

    run: str = required(
        "what holds the adapter: a run, an adapter folder (ours, PEFT's or mlx-lm's), or a "
        ".safetensors file",
        "RUN",
    )
    to: str = option(
        MISSING,
        "format to write: peft (a folder for PEFT and transformers), gguf (a file for llama.cpp's "
        "--lora), or mlx (a folder for mlx-lm's --adapter-path)",
        Check(FORMATS.__contains__, "peft, gguf or mlx"),
        metavar=f"{{{','.join(FORMATS)}}}",
    )
    output: str = output_option(
        MISSING, "folder to write; with --to gguf the file, such as adapter.gguf", "PATH"
    )
    bundle: str | None = option(
        None,
        "bundle of the model that the adapter belongs to (default: the one that the run was "
        "trained from; an adapter folder names none)",
        FILLED,
        metavar="BUNDLE",
    )
    base_model: str | None = option(
        None,
        "name or path from which the other tool loads the model, for the adapter's configuration "
        "(default: the name of the checkpoint that the bundle was exported from)",
        NAME,
        metavar="NAME",
    )
    force: bool = option(False, "replace an adapter that is there already")
