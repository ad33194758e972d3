"""The user's cache folder: files that ondevice can make again, and what it knows of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runtime.core.errors import StorageError


def cache_folder() -> Path:
    """`ondevice` in $XDG_CACHE_HOME; without it, in ~/Library/Caches (macOS) or ~/.cache.

    As the XDG specification demands, a relative $XDG_CACHE_HOME is ignored.

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
