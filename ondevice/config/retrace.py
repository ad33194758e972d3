"""`ondevice retrace`: a bundle's graphs traced again."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.config.base import Config, choice
from ondevice.config.shared import DEVICES, bundle_field


@dataclass(frozen=True, kw_only=True)
class RetraceConfig(Config):
    """`ondevice retrace`: a bundle's graphs traced again, for this MLX or another device."""

    bundle: str = bundle_field()
    device: str = choice("auto", "device that the graphs are for", *DEVICES)
