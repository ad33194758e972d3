"""Calls of functions in processes of their own, whose memory is not that of training.

`python -m runtime.data.process FUNCTION` reads limits and arguments on stdin and writes the result,
all as JSON. The arguments become what the function's annotations say. A function that takes long
tells by `tell` how much is done, in lines before the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import msgspec

from runtime.core.documents import from_json
from runtime.core.errors import DataError, OnDeviceError, StorageError, UsageError
from runtime.core.notes import Progress, no_progress
from runtime.data.limits import Limits, confine
from runtime.machine.compiling_process import be_ended_first

if TYPE_CHECKING:
    from subprocess import CompletedProcess

CALLED = "runtime.data.process"  # this module, which is `__main__` where it is called
_TOLD = "told: "  # how a line of `tell` begins
# threads reserve address space, which is limited
_FEW_THREADS = {
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def call(
    function: str,
    task: str,
    *arguments: object,
    limits: Limits | None = None,
    failure: type[OnDeviceError] = DataError,
    progress: Progress = no_progress,
) -> str:
    """Call a function by its full name, which does a `task`; returns its result as JSON.

    Its module is imported in the other process alone, before that is limited. `progress` is told
    the task, and how much of it is done.

    Raises:
        OnDeviceError: a UsageError, a StorageError or a `failure` that the function has raised; a
            `failure` if the process cannot be started, or ends in another way.
    """
    # -P keeps modules of the working directory out; the path lets an uninstalled checkout run
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    few = {} if limits is None else _FEW_THREADS
    python = sys.executable or ""  # where Python is part of another program, it may name none
    if not os.access(python, os.X_OK):
        raise failure(
            f"{task} takes another process of Python, and sys.executable, {python!r}, cannot be "
            "started: no such program, or no permission to run it"
        )
    done = ended(
        [python, "-P", "-m", CALLED, function],
        {**os.environ, "PYTHONPATH": paths, **few},
        # the standard library's JSON, which holds paths that are not UTF-8 too
        json.dumps(msgspec.to_builtins((limits, arguments), enc_hook=str)),
        lambda done, total: progress(task, done, total),
    )
    said = done.stderr.strip()
    for error in (UsageError, StorageError, failure):
        if done.returncode == error.exit_code:
            raise error(said)
    last = said.splitlines()[-1] if said else "it said nothing"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        under = "" if limits is None else f"; it may take {limits.describe()}"
        first = said.splitlines()[0] if said else last
        if done.returncode == -signal.SIGKILL:
            under += (
                "; the system does so where memory is short or the time of the CPU is spent: raise "
                "the limit (of the container, or by ulimit -t)"
            )
        raise failure(f"{task} was ended by {name}{under}: {first}")
    if done.returncode:
        raise failure(f"{task} failed with status {done.returncode}: {last}")
    return done.stdout


def ended(
    command: list[str],
    environment: dict[str, str],
    given: str,
    told: Callable[[int, int], None],
) -> CompletedProcess[str]:
    """A process that has ended, with all that it wrote but for the lines of `tell`."""
    import subprocess  # here, since training on data that are ready can do without its memory

    output = ""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            encoding="utf-8",
            errors="replace",
        )
        with process:
            try:
                assert process.stdin is not None and process.stdout is not None
                with suppress(BrokenPipeError), process.stdin:  # its exit code says why
                    process.stdin.write(given)
                for line in process.stdout:
                    if line.startswith(_TOLD) and line.endswith("\n"):
                        told(*map(int, line.removeprefix(_TOLD).split()))
                    else:
                        output += line
            except BaseException:
                process.kill()
                raise
        said.seek(0)
        complaints = said.read().decode(errors="replace")
    return subprocess.CompletedProcess(command, process.returncode, output, complaints)


def tell(done: int, total: int) -> None:
    """Tell whoever has called this process's function how much of its task is done."""
    assert sys.__stdout__ is not None
    sys.__stdout__.buffer.write(f"{_TOLD}{done} {total}\n".encode())
    sys.__stdout__.buffer.flush()


def main(words: list[str] | None = None) -> int:
    """Do what `call` asks for; complaints go to stderr. Returns the exit code."""
    (function,) = sys.argv[1:] if words is None else words
    module, _, name = function.rpartition(".")
    called = getattr(import_module(module), name)
    *types, _ = get_type_hints(called).values()
    bounds, arguments = from_json(sys.stdin.buffer.read())
    limits = msgspec.convert(bounds, Limits | None)
    try:
        values = [
            msgspec.convert(argument, of, dec_hook=lambda of, text: of(text))
            for argument, of in zip(arguments, types, strict=True)
        ]
        if limits is not None:
            confine(limits)
        with redirect_stdout(sys.stderr):  # where libraries may write
            result = msgspec.json.encode(called(*values))
    except OnDeviceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except MemoryError:
        under = (
            "the system gives no more"
            if limits is None
            else f"this process may take {limits.describe()}"
        )
        sys.stderr.write(f"there is not enough memory: {under}\n")
        return DataError.exit_code
    sys.stdout.buffer.write(result)
    return 0


if __name__ == "__main__":
    be_ended_first()
    sys.exit(main())
