"""Folders that tests look into."""

from __future__ import annotations

from pathlib import Path


def listing(folder: Path) -> list[str]:
    """Everything below a folder, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
