"""The options of `ondevice doctor`, which looks at the machine and the installed packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.config.bench import LENGTHS, MODEL_NAMES
from runtime.config.base import FILLED, Config, option


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """The options of `ondevice doctor`, which looks at the machine and the installed packages."""

    positional: ClassVar[str] = ""

    bench: bool = option(
        False,
        "also train three model shapes with random weights, and print the row that this machine "
        "adds to a table of speeds and footprints",
    )
    bundles: str = option(
        "bundles",
        "with --bench: directory of the bundles, which are exported when first needed",
        FILLED,
        metavar="DIR",
    )
    models: str | None = option(
        None,
        "with --bench: other shapes than the usual three, named as for `ondevice bench`",
        MODEL_NAMES,
    )
    seq_lens: str | None = option(None, "with --bench: tokens per row (default: 256)", LENGTHS)
    output: str = option("doctor.json", "with --bench: JSON file to write", FILLED, metavar="FILE")
