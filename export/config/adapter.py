"""The options of `ondevice adapter`, which writes an adapter as other tools read it."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from runtime.config.base import FILLED, Check, Config, option, output_option, required

FORMATS = ("peft", "gguf", "mlx")


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
        FILLED,
        metavar="NAME",
    )
    force: bool = option(False, "replace an adapter that is there already")
