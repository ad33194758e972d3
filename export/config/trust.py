"""The options of `ondevice trust`, which lets a bundle's own graphs run."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.base import Config, option
from runtime.config.shared import bundle_field


@dataclass(frozen=True, kw_only=True)
class TrustConfig(Config):
    """The options of `ondevice trust`, which lets a bundle's own graphs run."""

    bundle: str = bundle_field()
    yes: bool = option(False, "do not ask")
