"""The processes that `mpirun` has started together, as their environment says."""

from __future__ import annotations

import os
from typing import NamedTuple


class Launched(NamedTuple):
    """Which of how many processes this one is."""

    rank: int
    size: int


def launched() -> Launched:
    """This process among those that Open MPI's `mpirun` has started; it alone without that."""
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    return Launched(int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")), size)


def speaks() -> bool:
    """Whether this process shows results and progress: of several, rank 0 alone does."""
    return launched().rank == 0


def way_to_start(count: int, parallel: str, command: str) -> str:
    """The command that starts so many workers, for a message."""
    return f"mpirun -n {count} ondevice {command} ... --parallel {parallel}"
