"""Paths: those that users give, the folder of unfinished output, and the user's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runtime.core.errors import StorageError, UsageError
from runtime.core.files import storage_errors

OF_BUNDLES = ("manifest.json", "weights.bin", "graphs")  # what every bundle has


def text_path(path: str | Path) -> Path:
    """`path` itself, if it is valid UTF-8.

    It can then be printed, written to JSON and TOML, and given to libraries that take UTF-8, both
    as it is and as an absolute path.

    Raises:
        UsageError: the absolute path is not valid UTF-8, or has a null byte.
    """
    try:
        os.path.realpath(path).encode()
    except ValueError:
        raise UsageError(
            f"{str(path)!r}: its full name is not valid UTF-8, so it can be neither printed nor "
            "written to a run's config.toml; rename the file, or the folder that is named so"
        ) from None
    return Path(path)


def output_path(path: str | Path, other: str = "--output") -> Path:
    """`path` itself, as `text_path`, if something may be written there.

    `other` is the option that is to name another place, for messages.

    Raises:
        UsageError: it, or a folder in it, is a link to nothing, or it lies in a bundle, of which
            every file is known.
        StorageError: there can be no such path.
    """
    path = text_path(path)
    with storage_errors(path):
        places = (path, *path.parents)
        nowhere = [place for place in places if place.is_symlink() and not place.exists()]
        bundles = [folder for folder in Path(os.path.realpath(path)).parents if _is_bundle(folder)]
    if nowhere:
        raise UsageError(
            f"{nowhere[0]} is a link to {nowhere[0].readlink()}, where nothing is; remove the "
            f"link, or choose another {other}"
        )
    if bundles:
        raise UsageError(
            f"{path} lies in the bundle {bundles[0]}, into which nothing else is written; choose "
            f"another {other}"
        )
    return path


def _is_bundle(folder: Path) -> bool:
    return all((folder / name).exists() for name in OF_BUNDLES)


def partial_folder(destination: Path) -> Path:
    """The hidden folder beside `destination` in which its new content is prepared."""
    whole = Path(os.path.normpath(destination.absolute()))
    return whole.parent / f".{whole.name}.partial"


def cache_folder() -> Path:
    """`ondevice` in $XDG_CACHE_HOME; without it, in ~/Library/Caches (macOS) or ~/.cache.

    It has files that ondevice can write again, and the checksums of graphs that may run. As the XDG
    specification demands, a relative $XDG_CACHE_HOME is ignored.

    Raises:
        StorageError: the user has no home directory.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not chosen.is_absolute():
        try:
            home = Path.home()
        except RuntimeError:
            raise StorageError(
                "there is no home directory for the cache folder; set XDG_CACHE_HOME to a folder "
                "that can be written"
            ) from None
        chosen = home / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return chosen / "ondevice"


def is_mine(path: Path) -> bool:
    """Whether a file of the cache folder is there, and this user's own."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False
