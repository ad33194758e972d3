"""What workers exchange arrives bit for bit and in rank order, over threads and over MPI."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.exchange import NEEDS_MPI, in_turn, mpirun, on_workers, processes

from runtime.core.errors import UsageError
from runtime.parallel.exchange import PIECE_VALUES, Alone, Exchange

NAN = struct.unpack("<d", bytes.fromhex("0df0adde0000fc7f"))[0]  # with a payload
HARD = [0.1, -0.0, 5e-324, -math.inf, NAN, 1.7976931348623157e308]
COUNTS = [1, 6, 0, 3]


def exchanged(exchange: Exchange) -> str:
    """Everything that a worker can ask of an exchange, as text."""
    counts = COUNTS[: exchange.size]
    values = exchange.gather(HARD[: counts[exchange.rank]], counts)
    plan = exchange.broadcast(b"the plan of rank 0" if exchange.rank == 0 else b"?")
    return f"{struct.pack(f'<{len(values)}d', *values).hex()} {plan!r}"


def expected(size: int) -> str:
    values = [value for count in COUNTS[:size] for value in HARD[:count]]
    return f"{struct.pack(f'<{len(values)}d', *values).hex()} {b'the plan of rank 0'!r}"


def test_one_worker_has_its_own() -> None:
    """And sends nothing."""
    alone = Alone()
    assert exchanged(alone) == expected(1) and alone.sent_bytes == 0


@pytest.mark.parametrize("size", [2, 4])
def test_threads_exchange_every_bit(size: int) -> None:
    assert on_workers(size, exchanged) == [expected(size)] * size


def summed(exchange: Exchange) -> list[Any]:
    """The sums of arrays of all workers."""
    own = np.float32(0.1) * np.arange(1, 7, dtype=np.float32) * np.float32(exchange.rank + 1)
    return [
        np.array(a).tolist() for a in exchange.add([mx.array(own).reshape(2, 3), mx.array([1.0])])
    ]


def sums_of(size: int) -> list[Any]:
    own = np.float32(0.1) * np.arange(1, 7, dtype=np.float32)
    total = own.copy()
    for rank in range(1, size):
        total += own * np.float32(rank + 1)
    return [total.reshape(2, 3).tolist(), [float(size)]]


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_are_added_in_rank_order(size: int) -> None:
    assert summed(Alone()) == sums_of(1)
    assert in_turn(size, summed) == [sums_of(size)] * size


def summed_in_place(exchange: Exchange) -> list[Any]:
    """The sums of arrays (R, C) of all workers, of rows and of columns that lie together."""
    values = np.arange(40, dtype=np.float32).reshape(10, 4) * (exchange.rank + 1)
    arrays = mx.array(values), mx.array(values).T, mx.array(values)[::2]
    return [exchange.add_in_place(array).tolist() for array in arrays]


@pytest.mark.parametrize("size", [2, 3])
def test_large_arrays_are_added_in_place_and_piece_by_piece(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: list[int] = []
    add = Exchange.add

    def of_pieces(self: Exchange, arrays: Sequence[mx.array]) -> list[mx.array]:
        most.append(max(array.size for array in arrays))
        return add(self, arrays)

    monkeypatch.setattr("runtime.parallel.exchange.PIECE_VALUES", 12)
    monkeypatch.setattr(Exchange, "add", of_pieces)
    own = np.arange(40, dtype=np.float32).reshape(10, 4) * sum(range(size + 1))
    assert in_turn(size, summed_in_place) == [[a.tolist() for a in (own, own.T, own[::2])]] * size
    assert max(most) == 12


def test_a_large_array_is_not_copied_to_be_added() -> None:
    array = mx.ones((1 << 18, 8))
    mx.eval(array)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    values = np.array(array, copy=False)
    assert np.shares_memory(values, np.array(Alone().add_in_place(array), copy=False))
    assert mx.get_peak_memory() - before < 4 * PIECE_VALUES * 4 < array.nbytes / 4


@NEEDS_MPI
def test_processes_exchange_every_bit_over_mpi() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "from runtime.parallel.mpi import MpiExchange\n"
        "from tests.runtime.parallel.test_exchange import exchanged, summed, sums_of\n"
        "exchange = MpiExchange()\n"
        "assert summed(exchange) == sums_of(2)\n"
        "print(f'{exchange.rank} of {exchange.size}: {exchanged(exchange)}', flush=True)\n"
    )
    assert [line[: len(f"0 of 2: {expected(2)}")] for line in processes(2, code)] == [
        f"{rank} of 2: {expected(2)}" for rank in (0, 1)
    ]


# rank 1 never adds; without `stop` rank 0 would wait for it without an end
LOST_IN_A_SUM = """
import os, threading, time
import mlx.core as mx
from runtime.core.errors import WorkerError
from runtime.parallel.mpi import MpiExchange

exchange = MpiExchange()
if exchange.rank:
    time.sleep(60)
threading.Timer(0.1, exchange.stop, [WorkerError("rank 1 is gone")]).start()
try:
    exchange.await_sums(exchange.add([mx.ones(5)]))
except WorkerError as problem:
    print(problem, exchange.sent_bytes, flush=True)
    os._exit(7)
"""


@NEEDS_MPI
def test_the_waiting_for_a_sum_ends_when_a_worker_is_lost() -> None:
    ended = mpirun(["-c", LOST_IN_A_SUM], ["-c", LOST_IN_A_SUM])
    assert ended.returncode == 7 and ended.stdout == "rank 1 is gone 20\n", ended.stderr


def test_one_process_cannot_exchange_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.parallel.mpi import MpiExchange

    monkeypatch.setenv("MLX_MPI_LIBNAME", "no-such-library.so")
    with pytest.raises(UsageError, match=r"no workers .* over MPI .*mpirun -n 2"):
        MpiExchange()


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values of worker 0"):
        Alone().gather([1.0, 2.0], [1])
