"""The directory of a comparison: its files, and the check that they are of this comparison.

config.toml   the settings
sweep/   runs/   profile/   a run folder for each trial, each method, each method's profile
compare.json   compare.txt   compare.html   *.png   what was found
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ondevice.config.base import load, to_toml
from ondevice.config.compare import CompareConfig
from ondevice.errors import UsageError
from ondevice.files import storage_errors, write_atomic
from runtime.data.run_rows import absolute as absolute_data

CONFIG, SWEEP, RUNS, PROFILE = "config.toml", "sweep", "runs", "profile"
FOLDERS = (SWEEP, RUNS, PROFILE)
CHANGEABLE = ("methods",)  # settings on which no run depends: those of other methods stay


def absolute(config: CompareConfig) -> CompareConfig:
    """The settings with absolute paths, so that they mean the same from any directory."""
    return replace(
        config,
        bundle=str(Path(config.bundle).resolve()),
        data=absolute_data(config.data),
        eval_data=None if config.eval_data is None else absolute_data(config.eval_data),
        output=str(Path(config.output).resolve()),
    )


def open_folder(folder: Path, config: CompareConfig) -> None:
    """Create the directory, or check that it holds this comparison, maybe of other methods.

    Raises:
        UsageError: it holds a comparison with other settings, or other files.
    """
    if (folder / CONFIG).exists():
        known = vars(replace(load(CompareConfig, folder / CONFIG, {}), output=config.output))
        different = [
            f"{key} {value!r} (now {getattr(config, key)!r})"
            for key, value in known.items()
            if value != getattr(config, key) and key not in CHANGEABLE
        ]
        if different:
            raise UsageError(
                f"{folder} holds a comparison with other settings: {', '.join(different)}; give "
                "those again to continue it, or choose another -o"
            )
        if any(known[name] != getattr(config, name) for name in CHANGEABLE):
            write_atomic(folder / CONFIG, to_toml(config).encode())
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is a file or holds other files; choose another -o")
    with storage_errors(folder):
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
    write_atomic(folder / CONFIG, to_toml(config).encode())


def has_runs(folder: Path) -> bool:
    """Whether any training was started in it."""
    return any((run / CONFIG).exists() for name in FOLDERS for run in (folder / name).iterdir())


def remove(folder: Path, existed: bool) -> None:
    """Remove what a comparison without any run has written; `existed` keeps the directory."""
    if not existed:
        shutil.rmtree(folder)
        return
    (folder / CONFIG).unlink()
    for name in FOLDERS:
        shutil.rmtree(folder / name)
