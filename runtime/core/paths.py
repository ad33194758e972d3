"""Paths that users give: refused unless they are valid UTF-8.

A path that passes can be printed, written to JSON and TOML, and given to libraries that take
UTF-8, both as it is and as an absolute path.
"""

from __future__ import annotations

import os
from pathlib import Path

from runtime.core.errors import UsageError


def text_path(path: str | Path) -> Path:
    """`path` itself, if it is valid UTF-8.

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


def partial_folder(destination: Path) -> Path:
    """The hidden folder beside `destination` in which its new content is prepared."""
    whole = Path(os.path.normpath(destination.absolute()))
    return whole.parent / f".{whole.name}.partial"
