"""The options of `ondevice inspect` and `ondevice data`, which show a bundle and its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from runtime.config.base import NOT_NEGATIVE, Config, Group, option, required
from runtime.config.shared import (
    DATA_FILE,
    HUB_DATA,
    DataOptions,
    bundle_field,
    length_field,
    pack_field,
    valid_split_field,
)


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Config):
    """The options of `ondevice inspect`, which shows what a bundle holds."""

    bundle: str = bundle_field()
    verify: bool = option(False, "compare every file with its checksum")


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions):
    """The options of `ondevice data`, which shows what training would read."""

    positional: ClassVar[str] = "data"

    data: str = required(
        f"data: {DATA_FILE}, a folder with train, valid and test, or {HUB_DATA}", "DATA"
    )
    bundle: str = bundle_field()
    max_seq_length: int | None = length_field(Group.MAIN, aliases=())
    row: int = option(0, "the row to show, counted from 0 among those that are kept", NOT_NEGATIVE)
    valid_split: str | None = valid_split_field()
    pack: bool = pack_field()
