"""An exchange over MPI, by MLX's distributed layer, between processes that `mpirun` started."""

from __future__ import annotations

import atexit
import ctypes.util
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import mlx.core as mx
import numpy as np

from runtime.core.errors import UsageError
from runtime.parallel.exchange import Exchange, split

GRACE_S = 0.2  # for an exchange that is under way when a worker is lost


class MpiExchange(Exchange):
    """The processes of one `mpirun`.

    MPI waits without an end for a process that is gone. So a thread of its own waits for MPI, and
    the caller for the thread, until `stop` ends that with an error.
    """

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
        self._asked: SimpleQueue[bytes | Sequence[mx.array] | None] = SimpleQueue()
        self._answers: SimpleQueue[bytes | Exception] = SimpleQueue()
        self._stopped: Exception | None = None
        mx.default_stream(mx.cpu)  # graphs are bound to the first stream, which is not to be:
        self._stream = mx.new_thread_unsafe_stream(mx.cpu)  # of all messages, which stay in order
        self._thread = threading.Thread(target=self._serve, name="mpi", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _all_bytes(self, message: bytes) -> list[bytes]:
        joined, length = self._asked_of_thread(message), len(message)
        return [joined[rank * length : (rank + 1) * length] for rank in range(self.size)]

    def _asked_of_thread(self, asked: bytes | Sequence[mx.array]) -> bytes:
        """The thread's answer, unless `stop` ends the waiting."""
        if self._stopped is not None:
            raise self._stopped
        self._asked.put(asked)
        answer = self._answers.get()
        if isinstance(answer, Exception):  # of a worker that may have had this exchange before
            with suppress(Empty):
                answer = self._answers.get(timeout=GRACE_S)
            if isinstance(answer, Exception):
                raise answer
        return answer

    def add(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """See `Exchange.add`; MPI chooses the order, by the number of workers and of values."""
        if self._stopped is not None:
            raise self._stopped
        joined = mx.concatenate([array.reshape(-1) for array in arrays])
        mx.eval(joined)
        summed = mx.distributed.all_sum(joined, group=self._group, stream=self._stream)
        with mx.stream(self._stream):
            sums = split(summed, arrays)
        mx.async_eval(sums)  # type: ignore[no-untyped-call]
        self.sent_bytes += joined.nbytes
        return sums

    def await_sums(self, sums: Sequence[mx.array]) -> None:
        """See `Exchange.await_sums`; by the thread, so that `stop` can end the waiting."""
        with self._waiting(0):
            self._asked_of_thread(sums)

    def stop(self, reason: Exception) -> None:
        """End the waiting, and refuse to exchange any more, with this error."""
        self._stopped = reason
        self._answers.put(reason)

    def close(self) -> None:
        """End the thread, so that the process can leave MPI; not where an exchange has failed."""
        if self._thread.is_alive():
            self._asked.put(None)
            self._thread.join()
            del self._group

    def _serve(self) -> None:
        group = self._group
        while (asked := self._asked.get()) is not None:
            try:
                if isinstance(asked, bytes):
                    sent = mx.array(np.frombuffer(asked, np.uint8))
                    received = mx.distributed.all_gather(sent, group=group, stream=self._stream)
                    self._answers.put(np.array(received).tobytes())
                else:
                    mx.eval(*asked)
                    self._answers.put(b"")
            except Exception as problem:
                self._answers.put(problem)
            del asked  # sums, while the next are waited for


def _name_library() -> None:
    """Tell MLX the file of MPI's library, which it seeks as `libmpi.so`.

    On Debian that name comes with the headers only; `openmpi-bin` has `libmpi.so.40`.
    """
    library = ctypes.util.find_library("mpi") if sys.platform == "linux" else None
    if library is not None:
        os.environ.setdefault("MLX_MPI_LIBNAME", library)
