"""The options of `ondevice retrace`, which traces a bundle's graphs again."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.config.base import Config, choice
from ondevice.config.shared import DEVICES, bundle_field


@dataclass(frozen=True, kw_only=True)
class RetraceConfig(Config):
    """The options of `ondevice retrace`, which traces a bundle's graphs again."""

    bundle: str = bundle_field()
    device: str = choice("auto", "device that the graphs are for", *DEVICES)
