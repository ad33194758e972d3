"""How fast a model's layers reach a worker and leave it, whole or in slices: for `distzo2`.

`mpirun -n N python -m harness.bench.slices_process BUNDLE SLICES SCRATCH`. Each worker reads every
layer from its own copy of the weights, or its slice from the disk and the rest from the others; and
writes every layer to its own disk, or its slice of it. Files that are read are not in the system's
cache. Rank 0 prints the seconds of the slowest worker, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runtime.machine.backend import prepare

prepare()  # before MLX is loaded

import numpy as np  # noqa: E402

from harness.measure.page_cache import drop  # noqa: E402
from runtime.bundle.manifest import block_range  # noqa: E402
from runtime.bundle.store import Bundle, open_bundle  # noqa: E402
from runtime.core.errors import OnDeviceError  # noqa: E402
from runtime.core.stripes import WEIGHTS_FILE  # noqa: E402
from runtime.run.team import Team, team_of  # noqa: E402
from runtime.storage.slots import SlotLayout, Slots  # noqa: E402
from runtime.storage.weights import Weights  # noqa: E402

TURNS = 3


def measured(team: Team, whole: Bundle, sliced: Bundle, scratch: Path) -> dict[str, list[float]]:
    """The seconds of each way in each turn, of the slowest worker."""
    ranges = [block_range(whole.manifest, layer) for layer in whole.manifest.layers]
    layouts = [SlotLayout({"layer": stop - start}) for start, stop in ranges]
    assembly = Weights(sliced).assembly
    assert assembly is not None
    mine = scratch / str(team.rank)
    mine.mkdir()
    own = Slots(mine / "whole", layouts, b"")
    part = Slots(mine / "slice", layouts, b"", assembly=assembly)
    largest = np.zeros(max(stop - start for start, stop in ranges), np.uint8)

    def read_whole() -> None:
        with whole.weights_path.open("rb", buffering=0) as file:
            for start, stop in ranges:
                file.seek(start)
                file.readinto(largest[: stop - start].data)

    def read_slices() -> None:
        for start, stop in ranges:
            assembly.view(WEIGHTS_FILE, 0, start, stop, stop)

    def write(slots: Slots) -> None:
        for index, (start, stop) in enumerate(ranges):
            slots.write(index, 0, "layer", 0, largest[: stop - start])
            slots.finish(index, 0, 1)
        slots.sync()

    ways: dict[str, Callable[[], None]] = {
        "upload": read_whole,
        "upload, sliced": read_slices,
        "offload": lambda: write(own),
        "offload, sliced": lambda: write(part),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            for path in (whole.held_path, sliced.held_path):
                _leave_cache(path)
            team.workers.exchange.texts("")  # all begin together
            start_s = time.perf_counter()
            way()
            mine_s = time.perf_counter() - start_s
            counts = [1] * team.size
            seconds[name].append(max(team.workers.exchange.gather([mine_s], counts)))
            assembly.forget()
    return seconds


def _leave_cache(path: Path) -> None:
    """Let the system forget a file, where it can."""
    if sys.platform == "linux":
        drop(path)


def main() -> None:
    """Measure, and print it as JSON."""
    parser = argparse.ArgumentParser()
    for name in ("bundle", "slices", "scratch"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    try:
        ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        with team_of(f"data={ranks}", "bench", {}) as team:
            own = open_bundle(given.slices / f"{team.rank + 1}-of-{team.size}")
            whole = open_bundle(given.bundle)
            found = measured(team, whole, team.joined(own), given.scratch)
            if team.rank == 0:
                matrices = [
                    m for layer in whole.manifest.layers for m in whole.manifest.matrices_of(layer)
                ]
                parameters = sum(matrix.rows * matrix.columns for matrix in matrices)
                print(json.dumps({"ranks": team.size, "parameters": parameters, "seconds": found}))
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
