"""The files that a run will write, with their sizes, and whether the disk has room for them."""

from __future__ import annotations

import math
import shutil

from runtime.bundle.manifest import Manifest
from runtime.config.train import TrainConfig
from runtime.core.errors import StorageError
from runtime.core.units import format_bytes
from runtime.methods.adapters import Adapters
from runtime.operations.values import F32
from runtime.plan.plan import Plan, scratch_files
from runtime.run.budget import training
from runtime.run.folder import RunFolder
from runtime.storage.saves import SLOTS


def files_to_write(
    config: TrainConfig, manifest: Manifest, plan: Plan, folder: RunFolder, done: int = 0
) -> dict[str, int]:
    """Bytes of the files that a run will add to its folder, besides logs and tokens, by name.

    `done` are the steps that it has done.
    """
    task = training(config, manifest).task
    adapter_bytes = F32 * sum(map(math.prod, Adapters.shapes(manifest).values()))
    files = scratch_files(manifest, task, plan.stored_values, adapter_bytes)
    if task.demand.trains_weights:
        there = folder.path / SLOTS
        allocated = 512 * there.stat().st_blocks if there.exists() else 0
        return {**files, "weights": max(0, files["weights"] - allocated)}
    save = files["adapters"] + files["optimizer"]
    most = config.keep + config.keep_best + 1  # one is written before another is removed
    more = max(1, min(most - len(folder.saves.all()), _saves_after(config, done)))
    return {**files, "saves": more * save, "the adapter": files["adapters"]}


def _saves_after(config: TrainConfig, done: int) -> int:
    """How many saves a run makes at most after `done` steps."""
    every = [config.save_every, config.eval_every if config.keep_best else 0]
    times = [math.ceil((config.all_steps - done) / steps) for steps in every if steps]
    return 2 + sum(times)  # before the next step, and after the last


def check_disk(
    config: TrainConfig, manifest: Manifest, plan: Plan, folder: RunFolder, done: int = 0
) -> None:
    """Raise StorageError if the disk has too little space for all files of the run together.

    It is not asked where the file system does not state its size, as some of FUSE do not.
    """
    files = files_to_write(config, manifest, plan, folder, done)
    size, _, free = shutil.disk_usage(folder.path)
    if size and (needed := sum(files.values())) > free:
        sizes = [f"{name} {format_bytes(size, up=True)}" for name, size in files.items() if size]
        raise StorageError(
            f"the run will write {format_bytes(needed, up=True)} to {folder.path}, where "
            f"{format_bytes(free)} are free: {', '.join(sizes)}; make room, or choose another "
            "--output"
        )
