"""A token file and its data: a split, how it is read, and at which sequence bucket."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.config.shared import (
    DATA_FILE,
    DATA_SUFFIXES,
    HUB_DATA,
    DataOptions,
    columns_of,
    share_of,
)
from runtime.core.errors import DataError
from runtime.core.notes import Progress, no_progress
from runtime.core.paths import text_path
from runtime.core.units import first_of
from runtime.data.hub import NAMES, located
from runtime.data.limits import Limits
from runtime.data.process import call
from runtime.data.records import TEXT, suffix_of
from runtime.data.token_rows import RANDOM_ROWS, RandomRows, Rows, TokenRows, random_seed


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the process which tokenizes has to know.

    loss_on: see `DataOptions`. columns: our name of a field, and theirs. valid_share: the share of
    the rows that is held out of "train" and is all that "valid" has; 0 for no such split. beside:
    names of files of data in the folder that could be meant, too.
    """

    loss_on: str = "assistant"
    columns: dict[str, str] = {}
    skip_bad_rows: bool = False
    keep_empty: bool = False
    valid_share: float = 0.0
    beside: tuple[str, ...] = ()


READ_ALL = Reading()
_ADDRESS = re.compile(r"[a-z0-9]+:/")  # a path has lost the second / of its own
READ_BY_PEOPLE = ("readme", "license", "requirements", "changelog", "notice", "citation")
# files by which datasets describe a folder
DESCRIBING = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


def reading_of(config: DataOptions, valid_split: str | None = None) -> Reading:
    """The reading that the options of a command ask for."""
    return Reading(
        loss_on=config.loss_on,
        columns=columns_of(config.columns),
        skip_bad_rows=config.skip_bad_rows,
        keep_empty=config.keep_empty,
        valid_share=0.0 if valid_split is None else share_of(valid_split),
    )


def split_file(data: str | Path, split: str) -> Path | None:
    """The file that holds `split` (train, valid or test); None if a directory has none.

    A file is itself, whatever the split. Raises DataError if nothing is at `data`, or no file
    that can be read twice, or where a directory has the split twice, UsageError if the path is
    not valid UTF-8.
    """
    path = text_path(data)
    if path.is_file():
        return path
    if not path.is_dir():
        if path.exists():
            raise DataError(
                f"{path} is no file or folder but a pipe or a device, and data are read more than "
                "once; save them to a file"
            )
        if _ADDRESS.match(str(data)):
            raise DataError(f"{data} is an address; download the file, and name that")
        raise DataError(
            f"no data at {path}; give {DATA_FILE}, a folder, {HUB_DATA}, or random:SEED"
        )
    files = _files_of(path, NAMES[split])
    if same := [file.name for file in files if file.stem == files[0].stem][1:]:
        raise DataError(
            f"{path} has {' and '.join([files[0].name, *same])}; keep one, or name the file"
        )
    return files[0] if files else None


def _files_of(folder: Path, names: Sequence[str]) -> list[Path]:
    """A folder's files of data with these names, those with the first name first."""
    files = [file for file in _data_files(folder) if file.stem in names]
    return sorted(files, key=lambda file: names.index(file.stem))


def _data_files(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.iterdir())
        if suffix_of(file) in DATA_SUFFIXES and file.is_file()
    ]


def beside(folder: Path, split: str) -> tuple[str, ...]:
    """The names of a folder's files of data that could be meant by a split, and are not read.

    These are further ones of the split; for train also those that belong to none.
    """
    further = _files_of(folder, NAMES[split])[1:]
    if split == "train":
        names = [name for names in NAMES.values() for name in names]
        further += [
            file
            for file in _data_files(folder)
            if file.stem not in names
            and file.name not in DESCRIBING
            and file.stem.lower() not in READ_BY_PEOPLE
        ]
    return tuple(sorted(file.name for file in further))


def no_split(folder: Path, splits: str) -> DataError:
    """The error for a folder that has none of the wanted splits, with what it has."""
    there = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    has = f"; it has {first_of(there)}" if there else ", and nothing else"
    saved = " (load_from_disk(FOLDER)['train'].to_json('train.jsonl') writes what datasets saved)"
    arrow = saved if {"dataset_dict.json", "state.json"} & {*there} else ""
    return DataError(
        f"{folder} has no {splits} file{has}; name one file, or write one for each split, such as "
        f"train.jsonl and valid.jsonl{arrow}"
    )


def prepare_tokens(
    bundle_dir: Path,
    data: str | Path,
    split: str,
    max_seq_length: int,
    out_file: Path,
    reading: Reading = READ_ALL,
    part: str = "train",
    embedded: int | None = None,
    progress: Progress = no_progress,
) -> Path:
    """Tokenize `split` of `data` in another process into `out_file`, and return `out_file`.

    Rows predict at most `max_seq_length` tokens. `part` matters if rows are held out. Rows with a
    token beyond the `embedded` ones of the model are left out. `progress` counts rows. Raises
    DataError for data or a tokenizer that cannot be used, StorageError if the file cannot be
    written.
    """
    file = split_file(data, split)
    if file is None:
        raise no_split(Path(data), split)
    if file != Path(data) and part == "train":  # said once, not of the rows that are held out
        reading = msgspec.structs.replace(reading, beside=beside(file.parent, split))
    function, task = "runtime.data.tokenizing.tokenize", f"tokenizing {file}"
    limits = Limits.of_data(file.stat().st_size)
    made = bundle_dir, file, max_seq_length, out_file, reading, part, embedded
    call(function, task, *made, limits=limits, progress=progress)
    return out_file


@dataclass(frozen=True)
class TokenSource:
    """The token file `name`, of `split` of `data`; `part` matters under a `--valid-split`."""

    name: str
    data: str
    split: str
    reading: Reading
    part: str = "train"

    def rows(
        self,
        bundle: Bundle,
        folder: Path,
        max_seq_length: int,
        progress: Progress = no_progress,
    ) -> Rows:
        """The rows, of a token file that is made in the folder if it is not there yet.

        Raises as `prepare_tokens`, `TokenRows` and `random_seed`.
        """
        file, vocab_size = folder / self.name, bundle.manifest.vocab_size
        if file.exists():
            return TokenRows(file, vocab_size)
        if (seed := random_seed(self.data)) is not None:
            return RandomRows(seed, vocab_size, max_seq_length, RANDOM_ROWS)
        data = located(self.data, folder)
        prepare_tokens(
            *(bundle.path, data, self.split, max_seq_length, file),
            *(self.reading, self.part, vocab_size, progress),
        )
        return TokenRows(file, vocab_size)

    def bucket(self, bundle: Bundle, folder: Path, progress: Progress = no_progress) -> int:
        """The bundle's shortest bucket that holds every row, or its longest if none does.

        The token file that is made for this serves `rows` too. Text has no rows of its own: it
        gets the usual bucket, as do random rows.
        """
        manifest = bundle.manifest
        if self.data.startswith("random:"):
            return manifest.usual_bucket
        file = split_file(located(self.data, folder), self.split)
        if file is not None and suffix_of(file) == TEXT:
            return manifest.usual_bucket
        rows = self.rows(bundle, folder, manifest.buckets[-1], progress)
        longest = 0 if rows.report is None else rows.report.longest
        return bucket_holding(manifest, longest)


def bucket_holding(manifest: Manifest, longest: int) -> int:
    """The bundle's shortest bucket that holds the longest row, or its longest if none does."""
    return next((bucket for bucket in manifest.buckets if bucket >= longest), manifest.buckets[-1])


def bucket_to_pack(manifest: Manifest, bucket: int) -> int:
    """The bucket of packed sequences where none is given: that of text, or the one rows need."""
    return max(bucket, manifest.usual_bucket)
