"""A run's rows: tokenized once into the run's folder, so that resuming reads the same."""

from __future__ import annotations

from pathlib import Path

from ondevice.bundle.store import Bundle
from ondevice.config.train import TrainConfig
from ondevice.errors import DataError, UsageError
from runtime.data.reading import reading_of
from runtime.data.report import DataReport
from runtime.data.rows import Rows, TokenRows, open_rows, split_file

TOKENS = ("train.tokens", "valid.tokens")


def absolute(data: str) -> str:
    """The absolute path; `random:SEED` is returned unchanged."""
    return data if data.startswith("random:") else str(Path(data).resolve())


def open_run_rows(config: TrainConfig, bundle: Bundle, folder: Path) -> tuple[Rows, Rows | None]:
    """The training rows, and the evaluation rows if there are any.

    Raises:
        DataError: there is nothing to train on.
    """
    length, vocabulary = config.max_seq_length, bundle.manifest.vocab_size
    reading = reading_of(config, config.valid_split)
    whole = reading_of(config)
    found: list[Rows | None] = []
    sources = [(config.data, "train", reading)]
    is_random = config.data.startswith("random:")
    folder_data = not is_random and Path(config.data).is_dir()
    held_out = folder_data and split_file(config.data, "valid") is not None
    eval_data = config.eval_data or (config.data if held_out else None)
    if config.valid_split is not None:
        if is_random or eval_data is not None:
            raise UsageError(
                f"--valid-split holds out a part of data without validation rows; {config.data} is "
                f"{'random' if is_random else f'validated by {eval_data}'}: leave it out"
            )
        sources.append((config.data, "train", reading))
    elif eval_data is not None:
        sources.append((eval_data, "valid", whole))
    for (data, split, how), name, part in zip(sources, TOKENS, ("train", "valid"), strict=False):
        ready = folder / name
        if ready.exists():
            found.append(TokenRows(ready, vocabulary))
        else:
            found.append(open_rows(bundle.path, vocabulary, data, split, length, ready, how, part))
    rows = found[0]
    assert rows is not None
    if len(rows) == 0:
        raise DataError(f"{config.data} holds no row to train on")
    return rows, found[1] if len(found) > 1 else None


def reports_of(rows: Rows, eval_rows: Rows | None) -> dict[str, DataReport]:
    """What was read for training and for evaluation; random rows have no report."""
    both = {"train": rows, "valid": eval_rows}
    return {name: one.report for name, one in both.items() if one is not None and one.report}
