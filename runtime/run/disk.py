"""The files that a run will write, with their sizes, and whether the disk has room for them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from runtime.bundle.manifest import Manifest
from runtime.config.train import TrainConfig
from runtime.core.errors import StorageError
from runtime.core.files import free_bytes, storage_errors
from runtime.core.units import counted, format_bytes
from runtime.methods.adapters import Adapters
from runtime.operations.values import F32
from runtime.plan.plan import Plan, scratch_files
from runtime.run.budget import training
from runtime.run.folder import RunFolder
from runtime.run.team import Team
from runtime.storage.saves import CONFIG, SLOTS


class Place(NamedTuple):
    """Where a worker's files go: a folder, its file system's number, and how much is free there."""

    folder: str
    file_system: int
    free_bytes: int | None  # None where the file system does not state its size


def places_of(team: Team, folder: Path) -> list[Place]:
    """The places of all workers in rank order; all of them call this, each with its folder.

    Raises:
        StorageError: the folder of this worker cannot be looked at.
    """
    with storage_errors(folder):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        own = Place(str(folder), there.stat().st_dev, free_bytes(there))
    return [Place(*json.loads(text)) for text in team.workers.exchange.texts(json.dumps(own))]


def files_of_worker(config: TrainConfig, manifest: Manifest, plan: Plan) -> dict[str, int]:
    """Bytes of the files that every worker writes, by name: those that a step needs."""
    task = training(config, manifest)
    adapter_bytes = F32 * sum(map(math.prod, Adapters.shapes(manifest).values()))
    return scratch_files(manifest, task, plan.stored_values, adapter_bytes)


def files_to_write(
    config: TrainConfig, manifest: Manifest, plan: Plan, folder: RunFolder, done: int = 0
) -> dict[str, int]:
    """Bytes of the files that a run will add to its folder, besides logs and tokens, by name.

    `done` are the steps that it has done. Files of workers other than rank 0 are not among them.
    """
    files = files_of_worker(config, manifest, plan)
    if "weights" in files:
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
    config: TrainConfig,
    manifest: Manifest,
    plan: Plan,
    folder: RunFolder,
    team: Team,
    done: int = 0,
) -> None:
    """Raise StorageError if a disk has too little space for all files of the run's workers there.

    Rank 0 alone calls this, while the others call `places_of`. Two workers write to one disk if
    their machine and file system are the same: that several machines mount one over a network
    cannot be seen. A file system that does not state its size, as some of FUSE, is not asked.
    """
    others = files_of_worker(config, manifest, plan)
    places = places_of(team, folder.path)
    disks: dict[tuple[str, int], list[int]] = {}
    for rank, place in enumerate(places):
        disks.setdefault((team.hosts[rank], place.file_system), []).append(rank)
    for (host, _), ranks in disks.items():
        files = Counter[str]()
        for rank in ranks:
            own = others if rank else files_to_write(config, manifest, plan, folder, done)
            files.update(own)
        needed, free = sum(files.values()), places[ranks[0]].free_bytes
        if free is None or needed <= free:
            continue
        sizes = [f"{name} {format_bytes(size, up=True)}" for name, size in files.items() if size]
        there = (folder.path / CONFIG).exists()
        way_out = "move its folder to another disk" if there else "choose another --output"
        whose = f"'s {counted(len(ranks), 'process', 'processes')} on {host}"
        raise StorageError(
            f"the run{whose if team.size > 1 else ''} will write {format_bytes(needed, up=True)} "
            f"to {places[ranks[0]].folder}, where {format_bytes(free)} are free: "
            f"{', '.join(sizes)}; make room, or {way_out}"
        )
