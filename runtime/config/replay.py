"""The options of `ondevice replay`, which rebuilds from its log what a run has trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runtime.config.base import FILLED, Config, option, output_option, required
from runtime.config.shared import adapter_field


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Config):
    """The options of `ondevice replay`, which rebuilds from its log what a run has trained."""

    positional: ClassVar[str] = "run"

    run: str = required("directory of a run of a zeroth-order method, such as mezo", "RUN")
    output: str | None = output_option(
        None,
        "adapter directory to write, or with --trainable full the bundle (default: RUN/replayed)",
        "DIR",
    )
    bundle: str | None = option(
        None, "bundle of the run (default: where it was)", FILLED, metavar="BUNDLE"
    )
    initial: str | None = adapter_field(
        "adapter that the run started from (default: as the run's configuration says)"
    )
