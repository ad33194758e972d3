"""The options of `ondevice completion`, which prints a script for a shell."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from runtime.config.base import Check, Config, option

SHELLS = ("bash", "zsh", "fish", "tcsh")


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(Config):
    """The options of `ondevice completion`, which prints a script for a shell."""

    positional: ClassVar[str] = "shell"

    shell: str = option(
        MISSING,
        "shell that completes: bash, zsh, fish or tcsh",
        Check(SHELLS.__contains__, "bash, zsh, fish or tcsh"),
        metavar=f"{{{','.join(SHELLS)}}}",
    )
