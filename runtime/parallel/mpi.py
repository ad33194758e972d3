"""An exchange over MPI, by MLX's distributed layer, between processes that `mpirun` started."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from runtime.core.errors import UsageError
from runtime.parallel.exchange import Exchange, split


class MpiExchange(Exchange):
    """The processes of one `mpirun`; where one ends with an error, `mpirun` ends the others."""

    def __init__(self) -> None:
        """Wait for all processes.

        Raises:
            UsageError: MPI is not installed, or `mpirun` started no second process.
        """
        _name_library()
        try:
            self._group = mx.distributed.init(strict=True, backend="mpi")
        except RuntimeError as problem:
            raise UsageError(
                f"there are no workers to exchange with over MPI ({problem}); start two or more "
                "with `mpirun -n 2 COMMAND`, from Open MPI 4 or newer"
            ) from None
        self.rank, self.size = self._group.rank(), self._group.size()
        self._stream = mx.new_stream(mx.cpu)  # of all messages, so that they stay in order

    def all_bytes(self, message: bytes) -> list[bytes]:
        sent = mx.array(np.frombuffer(message, np.uint8))
        received = mx.distributed.all_gather(sent, group=self._group, stream=self._stream)
        joined, length = np.array(received).tobytes(), len(message)
        return [joined[rank * length : (rank + 1) * length] for rank in range(self.size)]

    def add(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """See `Exchange.add`; MPI chooses the order, by the number of workers and of values."""
        joined = mx.concatenate([array.reshape(-1) for array in arrays])
        mx.eval(joined)
        summed = mx.distributed.all_sum(joined, group=self._group, stream=self._stream)
        with mx.stream(self._stream):
            sums = split(summed, arrays)
        mx.async_eval(sums)  # type: ignore[no-untyped-call]
        return sums


def _name_library() -> None:
    """Tell MLX the file of MPI's library, which it seeks as `libmpi.so`.

    On Debian that name comes with the headers only; `openmpi-bin` has `libmpi.so.40`.
    """
    library = ctypes.util.find_library("mpi") if sys.platform == "linux" else None
    if library is not None:
        os.environ.setdefault("MLX_MPI_LIBNAME", library)
