"""The processes that `mpirun` has started, as a team: how they meet, and how all of them end."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.config.parallel import JOIN, Grid, grid_of, shared_folder
from runtime.core.errors import OnDeviceError, UsageError, WorkerError
from runtime.core.paths import output_path
from runtime.parallel.launch import host_name, launched
from runtime.parallel.watch import in_time, leave_launcher
from runtime.parallel.workers import Workers
from runtime.run.team import Team, code_of, versions

if TYPE_CHECKING:
    from runtime.parallel.heartbeat import Loss


@contextmanager
def team_of(parallel: str | None, command: str, options: Mapping[str, Any]) -> Iterator[Team]:
    """The processes that `mpirun` has started, which share the work of a command by `parallel`.

    Processes other than rank 0 end with the context if there is an error, without a message: rank 0
    shows it, and ends last.

    Raises:
        UsageError: they are not as many as `parallel` says, or differ in versions or options; or
            the folder that devices are to share is none, or a bundle.
    """
    started = launched()
    if (shared := shared_folder(parallel)) is not None:
        word, path = shared
        if word == JOIN or started.size > 1:
            raise UsageError(
                f"--parallel {parallel} is for a process of its own on each device, that joins by "
                "ondevice train BUNDLE --parallel join=DIR, without mpirun"
            )
        from runtime.parallel.fleet import Fleet  # other runs need not load it

        fleet = Fleet(Path(path))
        output_path(fleet.path / "messages", "folder")
        if not fleet.path.is_dir():
            raise UsageError(f"--parallel {parallel}: there is no such folder; make it first")
        yield Team(Workers(fleet=fleet))
        return
    grid = grid_of(parallel)
    if started.size == 1:
        if grid.size > 1:
            raise UsageError(_wrong_number(grid, 1, command))
        yield Team()
        return
    from runtime.parallel.mpi import MpiExchange  # a single process need not load them

    with in_time():
        exchange = MpiExchange()
        team = _met(exchange)
    try:
        if (parallel is None) or grid.size != exchange.size:
            raise UsageError(_wrong_number(grid, exchange.size, command))
        team.workers = Workers(exchange, grid.data, grid.perturb)
        same = {f"option {name}": repr(options[name]) for name in options}
        without_path = " ".join(command.split()[:2])  # each machine may have its own
        team.agree({"the command": without_path, **versions(), **same})
        yield team
        exchange.all_bytes(b"")  # nobody leaves MPI, which waits, while another still works
    except BaseException as problem:
        atexit.register(_exit, code_of(problem))  # MPI would wait for those that are gone
        if exchange.rank == 0:
            if team.heartbeat is not None and team.heartbeat.unreachable:
                atexit.register(leave_launcher)
            team.dismiss(problem)
            raise
        from runtime.core import signals

        signals.ignore()  # mpirun sends them once rank 0 has ended
        if not isinstance(problem, OnDeviceError | KeyboardInterrupt | OSError):
            traceback.print_exc()  # a fault of the program
        team.dismiss(problem)
        assert team.heartbeat is not None
        team.heartbeat.wait_for_end()
    team.leave()
    exchange.close()


def _met(exchange: Any) -> Team:
    """The workers, connected; none is checked yet."""
    from runtime.parallel.meeting import meet

    team = Team(Workers(exchange, exchange.size), tuple(exchange.texts(host_name())))

    def describe(loss: Loss) -> str:
        return f"{team.named(loss.rank)}: {loss.text}"

    def heard(loss: Loss) -> None:
        reason = WorkerError(describe(loss), loss.code)
        exchange.stop(reason)
        if team.holders is not None:
            team.holders.stop(reason)

    team.heartbeat = meet(exchange, team.hosts, heard, describe)
    return team


def _wrong_number(grid: Grid, started: int, command: str) -> str:
    if grid.size == 1:
        return (
            f"mpirun has started {started} processes, and without --parallel each would train a "
            f"run of its own into one folder; give --parallel data={started} or perturb={started} "
            "(rows or perturbations are shared), or start a single process without mpirun"
        )
    wanted = f"data={grid.data},perturb={grid.perturb}"
    processes = "1 process is" if started == 1 else f"{started} processes are"
    return (
        f"--parallel {wanted} is for {grid.data} x {grid.perturb} = {grid.size} processes, and "
        f"{processes} there; start them with: mpirun -n {grid.size} ondevice {command} ... "
        f"--parallel {wanted}"
    )


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
