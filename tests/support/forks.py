"""Commands in forks of a process that has imported what training imports.

A tiny run takes less time than these imports. As in a fresh process, nothing has been computed in
a fork before, and it ends as any process does. What asks more of a process than arguments, a
folder and an environment gets a fresh one, by `support.runs`.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[2]
# no handlers: what is put in place of progress bars must be there before them
IMPORTED = (
    "mlx.core",
    "ondevice.cli.main",
    "ondevice.cli.describe",
    "runtime.run.resume",
    "runtime.run.start",
)
# variables that are read before anything runs
READ_AT_START = ("PYTHON", "OPENBLAS", "OMP", "MLX", "MALLOC", "GLIBC", "LD_", "PATH")
EXPORTED = ("export.bundle", "export.fused", "transformers", "mlx_lm")  # what exports import, too
LARGEST_REQUEST = 1 << 18  # bytes


class Forks:
    """The process that forks, for one command at a time.

    program: the folder whose packages it imports, the repository or a changed copy of it.
    more: further modules that it imports.
    """

    def __init__(self, program: Path, more: Sequence[str] = ()) -> None:
        self._changed = {} if program == ROOT else {"PYTHONPATH": import_path(program)}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._start = _read_at_start()
        self._busy = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forks", str(theirs.fileno()), *more],
            cwd=program,
            env={**os.environ, **self._changed},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        atexit.register(self._end)

    def run(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str] | None:
        """What `python -c CODE ARGUMENTS` comes to, or None if it needs a fresh process."""
        if _read_at_start() != self._start or not self._busy.acquire(blocking=False):
            return None
        words = ["-c", *map(str, arguments)]
        environment = {**os.environ, **self._changed}
        request = {"words": words, "folder": str(Path.cwd()), "environment": environment}
        written = json.dumps({"code": code, **request}).encode()
        try:
            with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as warned:
                socket.send_fds(self._socket, [written], [said.fileno(), warned.fileno()])
                ended = self._socket.recv(64)
                if not ended:
                    raise RuntimeError("the process that forks has ended")
                return subprocess.CompletedProcess(words, int(ended), _text(said), _text(warned))
        finally:
            self._busy.release()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


@cache
def forks(program: Path, exporting: bool = False) -> Forks | None:
    """This process's own; None where a process that has imported MLX must not be forked.

    exporting: of a process that has also imported what exports import, which takes longer still.
    """
    if sys.platform != "linux":
        return None
    return Forks(program, EXPORTED if exporting else ())


def import_path(program: Path) -> str:
    """A program's packages, and what tests import beside them."""
    return os.pathsep.join(map(str, (program, ROOT, ROOT / "tests")))


def _read_at_start() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_AT_START)}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8").read()


def _serve(requests: socket.socket) -> None:
    """Fork for every request, and tell how the fork has ended."""
    while True:
        written, descriptors, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 2)
        if not written:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            for source, target in zip(descriptors, (1, 2), strict=True):
                os.dup2(source, target)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid == 0:
            _run(**json.loads(written))
        _, status = os.waitpid(pid, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _run(code: str, words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """What a fork does; it ends as a process does that has run the code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    sys.exit()


if __name__ == "__main__":
    from runtime.machine.backend import prepare

    prepare()  # before MLX is imported
    import gc
    import importlib

    for name in (*IMPORTED, *sys.argv[2:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no fork has to look through what is imported
    _serve(socket.socket(fileno=int(sys.argv[1])))
