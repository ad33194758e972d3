"""A run's rows: tokenized once into the run's folder, so that resuming reads the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runtime.bundle.store import Bundle
from runtime.config.train import TrainConfig
from runtime.core.errors import DataError, UsageError
from runtime.data.hub import forget, hub_dataset, located
from runtime.data.report import DataReport
from runtime.data.rows import Rows
from runtime.data.source import TokenSource, bucket_to_pack, reading_of, split_file

TOKENS = ("train.tokens", "valid.tokens")


def absolute(data: str) -> str:
    """The absolute path; `random:SEED` and datasets of the hub are returned unchanged."""
    is_path = not data.startswith("random:") and hub_dataset(data) is None
    return str(Path(data).resolve()) if is_path else data


def with_length(config: TrainConfig, bundle: Bundle, folder: Path) -> TrainConfig:
    """The configuration with a `max_seq_length`, which the data decide where none is given.

    Rows that are read for that are left in the folder, where `open_run_rows` finds them.
    """
    if config.max_seq_length is not None:
        return config
    bucket = max(source.bucket(bundle, folder) for source in _sources(config, folder))
    if config.pack:
        bucket = bucket_to_pack(bundle.manifest, bucket)
    return replace(config, max_seq_length=bucket)


def open_run_rows(config: TrainConfig, bundle: Bundle, folder: Path) -> tuple[Rows, Rows | None]:
    """The training rows, and the evaluation rows if there are any.

    Raises:
        DataError: there is nothing to train on.
    """
    most = config.max_seq_length
    assert most is not None
    rows, *held_out = [source.rows(bundle, folder, most) for source in _sources(config, folder)]
    forget(folder)
    if len(rows) == 0:
        raise DataError(f"{config.data} holds no row to train on")
    return rows, held_out[0] if held_out else None


def _sources(config: TrainConfig, folder: Path) -> list[TokenSource]:
    """The rows to train on, and those to evaluate on if there are any."""
    train, valid = TOKENS
    reading = reading_of(config, config.valid_split)
    first = TokenSource(train, config.data, "train", reading)
    is_random = config.data.startswith("random:")
    eval_data = config.eval_data or (config.data if _has_valid(config.data, folder) else None)
    if config.valid_split is not None:
        if is_random or eval_data is not None:
            raise UsageError(
                f"--valid-split holds out a part of data without validation rows; {config.data} is "
                f"{'random' if is_random else f'validated by {eval_data}'}: leave it out"
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


def reports_of(rows: Rows, eval_rows: Rows | None) -> dict[str, DataReport]:
    """The reports of the training and evaluation data; random rows have none."""
    both = {"train": rows, "valid": eval_rows}
    return {
        name: part_rows.report
        for name, part_rows in both.items()
        if part_rows is not None and part_rows.report
    }
