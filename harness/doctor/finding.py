"""One line of `ondevice doctor`: a part, how it is, and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How a part is. Nothing works without a part that is `BROKEN`; a `MISSING` one is optional."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The state of one part.

    text: for people. way: the remedy, where one is needed. facts: the figures, for JSON.
    """

    name: str
    status: Status
    text: str
    way: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The line that is printed."""
        way = f"; {self.way}" if self.way else ""
        return f"{self.status:8} {self.name}: {self.text}{way}"
