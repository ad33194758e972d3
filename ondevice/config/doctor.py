"""The options of `ondevice doctor`, which looks at the machine and what is installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ondevice.config.base import FILLED, Config, option
from ondevice.config.bench import LENGTHS, MODEL_NAMES


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """The options of `ondevice doctor`, which looks at the machine and what is installed."""

    positional: ClassVar[str] = ""

    bench: bool = option(
        False, "also train three shapes with random weights, and print a table row to send"
    )
    bundles: str = option(
        "bundles",
        "with --bench: directory of the bundles, which are exported when first needed",
        FILLED,
    )
    models: str | None = option(
        None, "with --bench: other shapes than the usual three, as a,b", MODEL_NAMES
    )
    seq_lens: str | None = option(None, "with --bench: tokens per row (default: 256)", LENGTHS)
    output: str = option("doctor.json", "with --bench: JSON file to write", FILLED)
