"""How data are read: the options of a command that decide which rows there are, and their loss."""

from __future__ import annotations

import msgspec

from runtime.config.shared import DataOptions, columns_of, share_of


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that tokenizes has to know.

    loss_on: see `DataOptions`. columns: our name of a field, and theirs. valid_share: the share of
    the rows that is held out of "train" and is all that "valid" has; 0 for no such split.
    """

    loss_on: str = "assistant"
    columns: dict[str, str] = {}
    skip_bad_rows: bool = False
    valid_share: float = 0.0


def reading_of(config: DataOptions, valid_split: str | None = None) -> Reading:
    """The reading that the options of a command ask for."""
    return Reading(
        loss_on=config.loss_on,
        columns=columns_of(config.columns),
        skip_bad_rows=config.skip_bad_rows,
        valid_share=0.0 if valid_split is None else share_of(valid_split),
    )
