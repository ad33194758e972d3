"""A kind of input that comes from elsewhere: how it is made, how it is changed, who reads it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from support.mutations import Rng, mutate, mutate_alike, mutate_bytes, pick

from ondevice.cli.main import main

Change = Callable[[Path, Rng], object]


@dataclass(frozen=True)
class Read:
    """What reading an input came to.

    facts: values of JSON that are equal wherever the same was read. free: other facts than those of
    the untouched input are right, because the input says something else.
    """

    code: int
    facts: Any = None
    free: bool = True


class Kind(ABC):
    """A kind of input.

    Everything runs in forked children: `prepare` once; then, for each case, `change` of a copy of
    one of the `originals` that `prepare` made, and `read`.
    """

    name: ClassVar[str]
    originals: ClassVar[tuple[str, ...]] = ("original",)
    made_by: ClassVar[str] = ""  # the kind whose originals these are, if not its own
    known: ClassVar[Mapping[str, Change]] = {}  # what has broken a reader before, by name

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Make a folder for each of the originals."""

    @abstractmethod
    def change(self, folder: Path, rng: Rng) -> object:
        """Change an input; returns what was done."""

    @abstractmethod
    def read(self, folder: Path, original: Path) -> Read:
        """Read a changed input; `original` is what it was. Raises OnDeviceError to refuse it."""

    def copy(self, original: Path, folder: Path) -> None:
        """Copy an original, hidden files too, before it is changed."""
        shutil.copytree(original, folder, symlinks=True)

    def choose(self, rng: Rng) -> str:
        """The original of a case."""
        return str(pick(rng, self.originals))


def ondevice(*words: object) -> int:
    """The exit code of a command, run in this process."""
    return main([str(word) for word in words])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def strict_json(path: Path) -> Any:
    """A document that is JSON to readers stricter than Python's: NaN is none."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{path} holds {word}, which is no JSON")

    return json.loads(path.read_bytes(), parse_constant=refuse)


def write(name: str, data: bytes) -> Change:
    """Give a file other bytes, where its folder is there."""

    def changed(folder: Path, rng: Rng) -> None:
        if (folder / name).parent.exists():
            (folder / name).write_bytes(data)

    return changed


def damage(path: Path, rng: Rng, upto: int | None = None) -> str:
    """Change bytes of a file before `upto` (default: anywhere); returns what was done."""
    data, done = mutate_bytes(path.read_bytes(), rng, upto)
    path.write_bytes(data)
    return done


def alter(path: Path, rng: Rng) -> str:
    """Change a value of a JSON file; returns what was done."""
    document = json.loads(path.read_bytes())
    done: str = pick(rng, (mutate, mutate_alike))(document, rng)
    path.write_text(json.dumps(document))
    return done


def put_in_place(path: Path, rng: Rng) -> str:
    """Put something that is no file where a file is expected; returns what it is."""
    other = pick(rng, ["directory", "FIFO", "broken link", "link to itself", "device"])
    path.unlink()
    if other == "directory":
        path.mkdir()
    elif other == "FIFO":
        os.mkfifo(path)
    elif other == "broken link":
        path.symlink_to("nothing")
    elif other == "link to itself":
        path.symlink_to(path.name)
    else:
        path.symlink_to("/dev/zero")
    return f"{path.name} is a {other}"
