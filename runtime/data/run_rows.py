"""A run's rows: tokenized once into the run's folder, so that resuming reads the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from runtime.bundle.store import Bundle
from runtime.config.shared import mix_of
from runtime.config.train import GENERAL, TrainConfig
from runtime.core.errors import DataError, UsageError
from runtime.core.notes import Progress, no_progress
from runtime.core.units import counted
from runtime.data.hub import forget, hub_dataset, located
from runtime.data.report import DataReport
from runtime.data.source import TokenSource, bucket_to_pack, reading_of, split_file
from runtime.data.token_rows import Lengths, Positions, Rows, Tokens, order

TOKENS = ("train.tokens", "valid.tokens")
MIX, ALSO = "mix.tokens", "also-{}.tokens"
_FURTHER = re.compile(r"mix\.tokens|also-[0-9]+\.tokens")
DRAW = -1  # in place of an epoch's number, of rows that are added
GENERAL_TEXT = Path(__file__).with_name("general.txt")


def is_tokens(name: str) -> bool:
    """Whether a file of this name in a run's folder holds its tokens."""
    return name in TOKENS or _FURTHER.fullmatch(name) is not None


class MixedRows:
    """The own rows, then some of the others: `share` times as many, drawn by the seed.

    At least one is drawn, and each at most once. `mixed` is the report of the others.
    """

    def __init__(self, own: Rows, others: Rows, share: float, seed: int) -> None:
        self._own, self._others = own, others
        self.wanted = max(1, round(share * len(own)))
        self._drawn = order(seed, DRAW, len(others))[: self.wanted]
        self.report: DataReport | None = own.report
        self.mixed: DataReport | None = others.report

    def __len__(self) -> int:
        return len(self._own) + len(self._drawn)

    @property
    def lengths(self) -> Lengths:
        return np.concatenate([self._own.lengths, self._others.lengths[self._drawn]])

    def row(self, index: int) -> tuple[Tokens, Positions]:
        """Row `index`, see Rows. Raises IndexError if there is no such row."""
        at = index - len(self._own)
        return self._own.row(index) if at < 0 else self._others.row(int(self._drawn[at]))

    def describe(self, data: str) -> str:
        """What was added, in one line."""
        count, few = len(self._drawn), ""
        if count < self.wanted:
            few = f" ({self.wanted} were asked for)"
        return (
            f"{counted(count, 'row')} of the {len(self._others)} in {data} "
            f"{'is' if count == 1 else 'are'} added to {counted(len(self._own), 'row')}{few}"
        )


@dataclass(frozen=True)
class RunRows:
    """The rows that a run trains on, held-out ones if there are any, and others, by their data."""

    train: Rows
    valid: Rows | None
    others: dict[str, Rows]

    @property
    def reports(self) -> dict[str, DataReport]:
        """The reports of the data; random rows, and the package's own text, have none."""
        mixed = self.train.mixed if isinstance(self.train, MixedRows) else None
        reports = {
            "train": self.train.report,
            "mix": mixed,
            "valid": None if self.valid is None else self.valid.report,
            **{name: rows.report for name, rows in self.others.items() if name != GENERAL},
        }
        return {name: report for name, report in reports.items() if report is not None}


def absolute(data: str) -> str:
    """The absolute path; `random:SEED` and datasets of the hub are returned unchanged."""
    is_path = not data.startswith("random:") and hub_dataset(data) is None
    return str(Path(data).resolve()) if is_path else data


def with_length(
    config: TrainConfig, bundle: Bundle, folder: Path, progress: Progress
) -> TrainConfig:
    """The configuration with a `max_seq_length`, which the data decide where none is given.

    Rows that are read for that are left in the folder, where `open_run_rows` finds them.
    """
    if config.max_seq_length is not None:
        return config
    sources = [*_sources(config, folder), *_mix(config)]
    bucket = max(source.bucket(bundle, folder, progress) for source in sources)
    if config.pack:
        bucket = bucket_to_pack(bundle.manifest, bucket)
    return replace(config, max_seq_length=bucket)


def open_run_rows(
    config: TrainConfig, bundle: Bundle, folder: Path, progress: Progress = no_progress
) -> RunRows:
    """The rows of a configuration whose `max_seq_length` is known; `progress` counts them.

    Raises:
        DataError: there is nothing to train on.
    """
    most = config.max_seq_length
    assert most is not None

    def read(source: TokenSource) -> Rows:
        return source.rows(bundle, folder, most, progress)

    rows, *held_out = map(read, _sources(config, folder))
    if len(rows) == 0:
        raise DataError(f"{config.data} holds no row to train on")
    for source in _mix(config):
        added = read(source)
        rows = MixedRows(rows, added, mix_of(config.mix or "")[1], config.seed)
    others = {name: read(source) for name, source in _others(config).items()}
    forget(folder)
    return RunRows(rows, held_out[0] if held_out else None, others)


def _mix(config: TrainConfig) -> list[TokenSource]:
    """The data whose rows are added, if there are any."""
    if config.mix is None:
        return []
    return [TokenSource(MIX, mix_of(config.mix)[0], "train", reading_of(config))]


def _others(config: TrainConfig) -> dict[str, TokenSource]:
    """The data that are evaluated beside the held-out ones, by their names."""
    return {
        name: TokenSource(
            ALSO.format(number),
            str(GENERAL_TEXT) if name == GENERAL else name,
            "valid",
            reading_of(config),
        )
        for number, name in enumerate(config.other_data, start=1)
    }


def _sources(config: TrainConfig, folder: Path) -> list[TokenSource]:
    """The rows to train on, and those to evaluate on if there are any."""
    train, valid = TOKENS
    reading = reading_of(config, config.valid_split)
    first = TokenSource(train, config.data, "train", reading)
    is_random = config.data.startswith("random:")
    eval_data = config.eval_data or (config.data if _has_valid(config.data, folder) else None)
    if config.valid_split is not None:
        if is_random or eval_data is not None:
            held_out = f"is validated by {config.eval_data}" if config.eval_data else "has some"
            raise UsageError(
                f"--valid-split holds out a part of data without validation rows; {config.data} "
                f"{'is random' if is_random else held_out}: leave it out"
            )
        return [first, TokenSource(valid, config.data, "train", reading, "valid")]
    return (
        [first] if eval_data is None else [first, TokenSource(valid, eval_data, "valid", reading)]
    )


def _has_valid(data: str, folder: Path) -> bool:
    """Whether the data themselves hold validation rows."""
    if data.startswith("random:"):
        return False
    if hub_dataset(data) is not None and (folder / TOKENS[0]).exists():
        return (folder / TOKENS[1]).exists()  # a resumed run does not load it again
    place = Path(located(data, folder))
    return place.is_dir() and split_file(place, "valid") is not None
