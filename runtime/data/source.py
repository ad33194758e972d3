"""A token file and what it is made from: a split of data, how it is read, and at what length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.data.hub import located
from runtime.data.reading import Reading
from runtime.data.records import TEXT
from runtime.data.rows import Rows, TokenRows, open_rows, split_file


@dataclass(frozen=True)
class TokenSource:
    """The token file `name`, of `split` of `data`; `part` matters under a `--valid-split`."""

    name: str
    data: str
    split: str
    reading: Reading
    part: str = "train"

    def rows(self, bundle: Bundle, folder: Path, length: int) -> Rows:
        """The rows, of a token file that is made in the folder if it is not there yet.

        Raises as `open_rows`.
        """
        file, vocabulary = folder / self.name, bundle.manifest.vocab_size
        if file.exists():
            return TokenRows(file, vocabulary)
        data = located(self.data, folder)
        given = (data, self.split, length, file, self.reading, self.part)
        return open_rows(bundle.path, vocabulary, *given)

    def length(self, bundle: Bundle, folder: Path) -> int:
        """The bundle's shortest length that holds every row, or its longest if none does.

        The token file that is made for this serves `rows` too. Text has no rows of its own: it
        gets the usual length, as do random rows.
        """
        manifest = bundle.manifest
        if self.data.startswith("random:"):
            return manifest.usual_bucket
        file = split_file(located(self.data, folder), self.split)
        if file is not None and file.suffix == TEXT:
            return manifest.usual_bucket
        rows = self.rows(bundle, folder, manifest.buckets[-1])
        longest = 0 if rows.report is None else rows.report.longest
        return length_holding(manifest, longest)


def length_holding(manifest: Manifest, longest: int) -> int:
    """The bundle's shortest length that holds the longest row, or its longest if none does."""
    return next((bucket for bucket in manifest.buckets if bucket >= longest), manifest.buckets[-1])


def length_to_pack(manifest: Manifest, length: int) -> int:
    """The length of packed sequences where none is given: that of text, or what rows need."""
    return max(length, manifest.usual_bucket)
