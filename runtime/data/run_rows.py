"""A run's rows: tokenized once into the run's folder, so that resuming reads the same."""

from __future__ import annotations

from pathlib import Path

from ondevice.bundle.store import Bundle
from ondevice.config.train import TrainConfig
from ondevice.errors import DataError
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
    length = config.max_seq_length
    found: list[Rows | None] = []
    sources = [(config.data, "train", TOKENS[0])]
    folder_data = not config.data.startswith("random:") and Path(config.data).is_dir()
    held_out = folder_data and split_file(config.data, "valid") is not None
    eval_data = config.eval_data or (config.data if held_out else None)
    if eval_data is not None:
        sources.append((eval_data, "valid", TOKENS[1]))
    for data, split, name in sources:
        ready = folder / name
        if ready.exists():
            found.append(TokenRows(ready, bundle.manifest.vocab_size))
        else:
            found.append(
                open_rows(
                    bundle.path, bundle.manifest.vocab_size, data, split, length, folder / name
                )
            )
    rows = found[0]
    assert rows is not None
    if len(rows) == 0:
        raise DataError(f"{config.data} holds no row to train on")
    return rows, found[1] if len(found) > 1 else None
