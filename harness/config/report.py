"""The options of `ondevice report`, which shows runs as one page of HTML."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from runtime.config.base import Check, Config, option

_RUNS = Check(
    lambda runs: bool(runs) and all(run.strip() for run in runs), "one or more run directories"
)
_PAGE = Check(lambda name: name.endswith(".html"), "a name that ends in .html")


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """The options of `ondevice report`, which shows runs as one page of HTML."""

    positional: ClassVar[str] = "runs"

    runs: tuple[str, ...] = option(
        MISSING, "run directories, written by `ondevice train`", _RUNS, metavar="RUN..."
    )
    output: str = option(
        "report.html",
        "page to write; one that is there already is replaced",
        _PAGE,
        metavar="FILE",
        aliases=("-o",),
    )
