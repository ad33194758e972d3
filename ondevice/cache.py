"""The user's cache folder: files that ondevice can make again, and what it knows of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`ondevice` in $XDG_CACHE_HOME; without it, in ~/Library/Caches (macOS) or ~/.cache.

    As the XDG specification demands, a relative $XDG_CACHE_HOME is ignored.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not chosen.is_absolute():
        chosen = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return chosen / "ondevice"
