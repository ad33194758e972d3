"""The options of `ondevice inspect`, which shows what a bundle holds."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.base import Config, option
from runtime.config.shared import bundle_field


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """The options of `ondevice inspect`, which shows what a bundle holds."""

    bundle: str = bundle_field()
    verify: bool = option(False, "compare every file with its checksum")
