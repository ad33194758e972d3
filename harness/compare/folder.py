"""The directory of a comparison: its files, and the check that they are of this comparison.

config.toml   the settings
sweep/   runs/   a run folder for each trial, and for each method
compare.json   compare.txt   compare.html   *.svg   the results
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from harness.config.compare import BY_METHOD, CompareConfig
from runtime.config.base import load, to_toml
from runtime.core.errors import UsageError
from runtime.core.files import storage_errors, write_atomic
from runtime.core.lookalikes import is_comparison
from runtime.core.paths import output_path
from runtime.data.run_rows import absolute as absolute_data

CONFIG, SWEEP, RUNS = "config.toml", "sweep", "runs"
FOLDERS = (SWEEP, RUNS)


def absolute(config: CompareConfig) -> CompareConfig:
    """The settings with absolute paths, so that they mean the same from any directory."""
    return replace(
        config,
        bundle=str(Path(config.bundle).resolve()),
        data=absolute_data(config.data),
        eval_data=None if config.eval_data is None else absolute_data(config.eval_data),
        output=str(output_path(config.output).resolve()),
    )


def open_folder(folder: Path, config: CompareConfig) -> None:
    """Create the directory, or check that it holds this comparison, maybe of other methods.

    A directory may take further methods with settings of their own. Those of methods that it has
    already must stay, and are kept for a method that is left out this time.

    Raises:
        UsageError: it holds a comparison with other settings, or other files.
    """
    if (folder / CONFIG).exists() and is_comparison(folder):
        try:
            known = replace(load(CompareConfig, folder / CONFIG, {}), output=config.output)
        except UsageError as problem:
            raise UsageError(
                f"{folder / CONFIG}: {problem}; if another version of ondevice began this "
                "comparison, go on with that one, or choose another -o"
            ) from None
        if different := _different(known, config):
            raise UsageError(
                f"{folder} holds a comparison with other settings: {', '.join(different)}; give "
                "those again to continue it, or choose another -o"
            )
        if (merged := config.with_others(known)) != known:
            write_atomic(folder / CONFIG, to_toml(merged).encode())
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is a file or holds other files; choose another -o")
    with storage_errors(folder):
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
    write_atomic(folder / CONFIG, to_toml(config).encode())


def _different(known: CompareConfig, config: CompareConfig) -> list[str]:
    """The settings that differ, in words; those of each method where the comparison has it."""
    shared = [method for method in config.method_names if method in known.method_names]
    differences = []
    for name, value in vars(known).items():
        now = getattr(config, name)
        if name in BY_METHOD:
            changed = any(
                known.value_of(name, method) != config.value_of(name, method) for method in shared
            )
        else:
            changed = name != "methods" and value != now
        if changed:
            differences.append(f"{name} {value!r} (now {now!r})")
    return differences


def has_runs(folder: Path) -> bool:
    """Whether any training was started in it."""
    return any((run / CONFIG).exists() for name in FOLDERS for run in (folder / name).iterdir())


def remove(folder: Path, existed: bool) -> None:
    """Remove the files of a comparison without any run; `existed` keeps the directory."""
    if not existed:
        shutil.rmtree(folder)
        return
    (folder / CONFIG).unlink()
    for name in FOLDERS:
        shutil.rmtree(folder / name)
