"""What training would read of data, found without training: counts, lengths and one row in full."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ondevice.bundle.store import Bundle
from ondevice.config.data import DataConfig
from ondevice.errors import DataError, UsageError
from runtime.data.examples import Row
from runtime.data.hub import located
from runtime.data.reading import Reading, reading_of
from runtime.data.records import TEXT
from runtime.data.report import DataReport
from runtime.data.rows import split_file
from runtime.data.text_encoder import TextEncoder, load_encoder
from runtime.data.tokenizing import TRAIN, VALID, Reader

SPLITS = (TRAIN, VALID, "test")


@dataclass(frozen=True)
class Overview:
    """The report of each split by name, and a row of the first: pieces of text, scored or not."""

    reports: dict[str, DataReport]
    row: list[tuple[str, bool]]


def overview(config: DataConfig, bundle: Bundle) -> Overview:
    """Read the data as training would.

    Raises:
        DataError: the data or the tokenizer cannot be used, or there is no row so far.
        UsageError: the data are random, or have validation rows beside a `--valid-split`.
    """
    if config.data.startswith("random:"):
        raise UsageError(f"{config.data} has no rows to show; name a file or a folder")
    encoder, manifest = load_encoder(bundle.path), bundle.manifest
    reports: dict[str, DataReport] = {}
    shown: Row | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for name, file, reading in _parts(config, Path(scratch)):
            usual = manifest.usual_bucket if file.suffix == TEXT else manifest.buckets[-1]
            length = config.max_seq_length or usual
            reader = Reader(file, encoder, length, reading, VALID if name == VALID else TRAIN)
            for number, row in enumerate(reader.rows()):
                if not reports and number == config.row:
                    shown = row
            reports[name] = reader.report
    if shown is None and config.row:
        kept = next(iter(reports.values())).kept
        raise UsageError(f"there is no row {config.row}: {kept} are kept, counted from 0")
    return Overview(reports, [] if shown is None else pieces(shown, encoder))


def pieces(row: Row, encoder: TextEncoder) -> list[tuple[str, bool]]:
    """A row as text, special tokens too, in runs of tokens that are scored or not."""
    both = zip(row.tokens, row.scored, strict=True)
    runs = groupby(both, key=lambda one: bool(one[1]))
    return [(encoder.show([token for token, _ in run]), scored) for scored, run in runs]


def _parts(config: DataConfig, scratch: Path) -> list[tuple[str, Path, Reading]]:
    """The files to read by the name of their split, and how each is read."""
    path, split = Path(located(config.data, scratch)), config.valid_split
    reading = reading_of(config, split)
    if not path.is_dir():
        file = split_file(path, TRAIN)
        assert file is not None
        return [(name, file, reading) for name in ((TRAIN, VALID) if split else (TRAIN,))]
    found = {name: split_file(path, name) for name in SPLITS}
    if split and found[VALID]:
        raise UsageError(f"--valid-split is for data without validation rows; see {found[VALID]}")
    if split:
        found[VALID] = found[TRAIN]
    files = [(name, file) for name, file in found.items() if file is not None]
    if not files:
        raise DataError(f"{path} has no train, valid or test file")
    whole = reading_of(config)
    return [(name, file, whole if name == "test" else reading) for name, file in files]
