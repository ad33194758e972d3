"""The version of ondevice, and of packages beside it."""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"


def installed_version(package: str) -> str:
    """The version of an installed package, "" if it is not installed.

    It is that in the name of the package's metadata folder; `importlib.metadata` takes 1.5 MB.
    """
    for entry in sys.path:
        for folder in sorted(Path(entry).glob(f"{package}-*.dist-info")):
            return folder.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""
