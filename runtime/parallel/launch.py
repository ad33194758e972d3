"""The processes that `mpirun` has started together, as their environment says."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class Launched(NamedTuple):
    """Which of how many processes this one is, and how many of them are on this machine."""

    rank: int
    size: int
    here: int


def launched() -> Launched:
    """This process among those that Open MPI's `mpirun` has started; it alone without that."""
    rank, size, here = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", alone))
        for name, alone in (("RANK", "0"), ("SIZE", "1"), ("LOCAL_SIZE", "1"))
    )
    return Launched(rank, size, here)


def speaks() -> bool:
    """Whether this process shows results and progress: of several, rank 0 alone does."""
    return launched().rank == 0


def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname()
