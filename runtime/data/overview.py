"""An overview of data as training would read them: counts, lengths and one row in full."""

from __future__ import annotations

import tempfile
from array import array
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np

from runtime.bundle.manifest import Manifest
from runtime.bundle.store import open_bundle
from runtime.config.inspect import DataConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.core.notes import Progress, no_progress
from runtime.data.hub import located
from runtime.data.limits import Limits
from runtime.data.loss_mask import Row
from runtime.data.packing import PackingReport, pack
from runtime.data.process import call, tell
from runtime.data.records import TEXT, suffix_of
from runtime.data.report import DataReport
from runtime.data.source import (
    Reading,
    beside,
    bucket_holding,
    bucket_to_pack,
    no_split,
    reading_of,
    split_file,
)
from runtime.data.text_encoder import TextEncoder, load_encoder
from runtime.data.token_rows import Lengths
from runtime.data.tokenizing import TRAIN, VALID, Reader
from runtime.plan.plan import choose_bucket

SPLITS = (TRAIN, VALID, "test")


@dataclass(frozen=True)
class Overview:
    """The report of each split by name, and a row of the first: pieces of text, scored or not.

    `packing` is the report of packing the first split's rows, if that is asked for.
    """

    reports: dict[str, DataReport]
    row: list[tuple[str, bool]]
    packing: PackingReport | None = None


def confined_overview(config: DataConfig, progress: Progress = no_progress) -> Overview:
    """As `overview`, in a process of its own under limits.

    Raises:
        DataError, UsageError: as `overview`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(located(config.data, Path(scratch)))
        files = [path for path in data.iterdir() if path.is_file()] if data.is_dir() else [data]
        size_bytes = sum(file.stat().st_size for file in files if file.is_file())
        said = call(
            "runtime.data.overview.overview",
            f"reading {config.data}",
            replace(config, data=str(data)),
            limits=Limits.of_data(size_bytes),
            progress=progress,
        )
    return msgspec.json.decode(said, type=Overview)


def overview(config: DataConfig) -> Overview:
    """Read the data as training would.

    Raises:
        DataError: the data or the tokenizer cannot be used, or there is no row so far.
        UsageError: the data are random, or have validation rows beside a `--valid-split`.
    """
    if config.data.startswith("random:"):
        raise UsageError(f"{config.data} has no rows to show; name a file or a folder")
    bundle = open_bundle(config.bundle)
    encoder, manifest = load_encoder(bundle.path), bundle.manifest
    reports: dict[str, DataReport] = {}
    shown: Row | None = None
    lengths = array("q")  # of the first split's rows
    with tempfile.TemporaryDirectory() as scratch:
        for name, file, reading in _parts(config, Path(scratch)):
            usual = manifest.usual_bucket if suffix_of(file) == TEXT else manifest.buckets[-1]
            max_seq_length = config.max_seq_length or usual
            reader = Reader(
                file,
                encoder,
                max_seq_length,
                reading,
                VALID if name == VALID else TRAIN,
                manifest.vocab_size,
                tell,
            )
            for number, row in enumerate(reader.rows()):
                if not reports:
                    lengths.append(row.predicted_tokens)
                    shown = row if number == config.row else shown
            reports[name] = reader.report
    if shown is None and config.row:
        kept = next(iter(reports.values())).kept
        raise UsageError(f"there is no row {config.row}: {kept} are kept, counted from 0")
    shown_row = [] if shown is None else pieces(shown, encoder)
    if not config.pack or not lengths:
        return Overview(reports, shown_row)
    longest = max(report.longest for name, report in reports.items() if name in (TRAIN, VALID))
    max_seq_length = config.max_seq_length or bucket_to_pack(
        manifest, bucket_holding(manifest, longest)
    )
    return Overview(reports, shown_row, _packed(np.array(lengths), max_seq_length, manifest))


def _packed(lengths: Lengths, max_seq_length: int, manifest: Manifest) -> PackingReport:
    """The report of packing rows of these lengths, with the default seed."""
    packing = pack(lengths, choose_bucket(manifest, max_seq_length), TrainConfig.seed)
    return packing.report(lengths, manifest.buckets)


def pieces(row: Row, encoder: TextEncoder) -> list[tuple[str, bool]]:
    """A row as text, special tokens too, in runs of tokens that are scored or not."""
    marked = zip(row.tokens, row.scored, strict=True)
    runs = groupby(marked, key=lambda pair: bool(pair[1]))
    return [(encoder.show([token for token, _ in run]), scored) for scored, run in runs]


def _parts(config: DataConfig, scratch: Path) -> list[tuple[str, Path, Reading]]:
    """The files to read by the name of their split, and how each is read."""
    path, split = Path(located(config.data, scratch)), config.valid_split
    reading = reading_of(config, split)
    if not path.is_dir():
        file = split_file(path, TRAIN)
        assert file is not None
        return [(name, file, reading) for name in ((TRAIN, VALID) if split else (TRAIN,))]
    split_files = {name: split_file(path, name) for name in SPLITS}
    if split and split_files[VALID]:
        raise UsageError(
            f"--valid-split is for data without validation rows; see {split_files[VALID]}"
        )
    if split:
        split_files[VALID] = split_files[TRAIN]
    files = [(name, file) for name, file in split_files.items() if file is not None]
    if not files:
        raise no_split(path, "train, valid or test")
    others = {name: () if split and name == VALID else beside(path, name) for name, _ in files}
    readings = {name: reading_of(config) if name == "test" else reading for name, _ in files}
    return [
        (name, file, msgspec.structs.replace(readings[name], beside=others[name]))
        for name, file in files
    ]
