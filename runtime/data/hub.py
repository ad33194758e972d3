"""Datasets of the Hugging Face hub, which a process of its own writes as files of JSON lines.

There the library `datasets` loads them, whose memory so never counts in the process that trains.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config.shared import DATA_SUFFIXES
from runtime.core.errors import DataError
from runtime.core.files import storage_errors
from runtime.data.process import call

_ID = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<config>[\w.-]*))?(?::(?P<split>[^:]+(?::[^:]+)?))?"
)
FOLDER = "dataset-"  # begins the name of the folder that a dataset is written to
ROWS = "rows.jsonl"  # of one split that was asked for
NAMES = {  # our names of splits, and those of datasets and of files in folders
    "train": ("train",),
    "valid": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test",),
}


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub; with a `split` (such as train[:10%]) only that is meant."""

    name: str
    config: str | None = None
    split: str | None = None


def hub_dataset(data: str) -> HubDataset | None:
    """The dataset that OWNER/NAME[:CONFIG[:SPLIT]] names.

    None if it names something else: a path that exists, a file of data, or random:SEED.
    """
    match = _ID.fullmatch(data)
    if match is None or Path(data).exists() or Path(match["name"]).suffix.lower() in DATA_SUFFIXES:
        return None
    return HubDataset(match["name"], match["config"] or None, match["split"])


def located(data: str, scratch: Path) -> str:
    """Where the data are: below `scratch` if they are a dataset of the hub, else where they say.

    A dataset is loaded once, as a folder of train, valid and test files, or as one file if it
    names a split.

    Raises:
        DataError: it cannot be loaded.
        StorageError: it cannot be written.
    """
    dataset = hub_dataset(data)
    if dataset is None:
        return data
    folder = scratch.resolve() / (FOLDER + re.sub(r"[^\w.-]", "-", data))
    if not folder.exists():
        call("runtime.data.hub.download", f"loading {data}", data, folder)
    return str(folder / ROWS if dataset.split else folder)


def forget(scratch: Path) -> None:
    """Remove the datasets that `located` has written."""
    for folder in scratch.glob(f"{FOLDER}*"):
        shutil.rmtree(folder)


def load(dataset: HubDataset) -> dict[str, Iterable[Mapping[str, Any]]]:
    """The rows of each file. Raises DataError where `datasets` is missing or cannot load them."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"there is no file or folder {dataset.name}, and reading it from the Hugging Face hub "
            "needs datasets: pip install 'ondevice-tune[datasets]'"
        ) from None
    try:
        loaded = datasets.load_dataset(dataset.name, dataset.config, split=dataset.split)
    except Exception as error:  # the library lets through those of all that it uses
        raise DataError(
            f"there is no file or folder {dataset.name}, and the Hugging Face dataset cannot be "
            f"loaded: {str(error).strip() or type(error).__name__}; check its name and the "
            "network, or save it as .jsonl or .parquet and give that"
        ) from None
    if dataset.split:
        return {ROWS: loaded}
    files = {
        f"{ours}.jsonl": loaded[name]
        for ours, names in NAMES.items()
        if (name := next((split for split in names if split in loaded), None)) is not None
    }
    if not files:
        example = f"{dataset.name}:{dataset.config or ''}:{next(iter(loaded))}"
        raise DataError(
            f"{dataset.name} has the splits {', '.join(map(str, loaded))} and none of train, "
            f"validation and test; name one, as in {example}"
        )
    return files


def download(data: str, folder: Path) -> None:
    """Write the files of a dataset, whose name `hub_dataset` knows."""
    dataset = hub_dataset(data)
    assert dataset is not None, data
    write(load(dataset), folder)


def write(files: Mapping[str, Iterable[Mapping[str, Any]]], folder: Path) -> None:
    """Write rows as JSON lines; the folder appears whole or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    with storage_errors(folder):
        partial.mkdir(exist_ok=True)  # not its parents: a run that was removed stays so
        for name, rows in files.items():
            with (partial / name).open("w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, default=str) + "\n")
        partial.rename(folder)
