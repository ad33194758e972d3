"""The version of ondevice, of the formats of its files, and of packages beside it."""

from __future__ import annotations

import sys
from pathlib import Path

__version__ = "0.1.0"


def of_another_version(stamp: object, own: int, way_out: str, writer: object = None) -> str:
    """Why a file cannot be read whose format has the version `stamp`; empty if it is `own`.

    It is asked before any other field is read: these are what versions differ in. `writer` is the
    program that wrote the file, as the file says.
    """
    if type(stamp) is int and stamp == own:
        return ""
    whose = f"{writer:.40}" if isinstance(writer, str) else "another version of ondevice"
    version = "no format version" if stamp is None else f"format version {stamp!r:.20}"
    return (
        f"{whose} wrote it, with {version}, and this is ondevice {__version__}, which reads "
        f"version {own}; {way_out}"
    )


def installed_version(package: str) -> str:
    """The version of an installed package, "" if it is not installed.

    It is that in the name of the package's metadata folder; `importlib.metadata` takes 1.5 MB.
    """
    for entry in sys.path:
        for folder in sorted(Path(entry).glob(f"{package}-*.dist-info")):
            return folder.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""
