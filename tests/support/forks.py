"""Commands in forks of a process that has imported what they import.

A tiny run takes less time than these imports, and so does a process of `runtime.data.process`. As
in a fresh process, nothing has been computed in a fork before, and it ends as any process does.
What asks more of a process than arguments, a folder, an environment and its input gets a fresh
one, by `support.runs`.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from runtime.data import process

ROOT = Path(__file__).parents[2]
# no handlers: what is put in place of progress bars must be there before them
TRAINING = (
    "mlx.core",
    "ondevice.cli.main",
    "ondevice.cli.describe",
    "runtime.methods.mebp",
    "runtime.methods.zeroth.mezo",
    "runtime.methods.zeroth.zeroth_order",
    "runtime.run.resume",
    "runtime.run.start",
)
EXPORTING = (*TRAINING, "export.bundle", "export.fused", "transformers", "mlx_lm")
CONFINED = (  # modules that are called in processes of their own, and what they import late
    "runtime.data.tokenizing",
    "runtime.data.overview",
    "runtime.data.prompts",
    "runtime.data.pieces",
    "export.tracing_process",
    "export.graph_files",
    "mlx_lm",
    "transformers.utils.chat_template_utils",
    "transformers:PreTrainedTokenizerFast",
)
CONFINED_AT = "ONDEVICE_TEST_FORKS"  # the address of the process that forks for these modules
# variables that are read before anything runs, beside the path, and limits that a process inherits
READ_AT_START = ("PYTHON", "OPENBLAS", "OMP", "MLX", "MALLOC", "GLIBC", "LD_", "PATH")
INHERITED = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
LARGEST_REQUEST = 1 << 18  # bytes
MOST_S = 600  # nothing that forks do takes so long, unless it never ends
FRESH = "fresh"  # the answer where a fork would not be as a fresh process is


class Forks:
    """The process that forks.

    program: the folder whose packages it imports, the repository or a changed copy of it.
    imported: the modules that it imports; of "module:name" it also reads the name.
    """

    def __init__(self, program: Path, imported: Sequence[str], **environment: str) -> None:
        folder = tempfile.mkdtemp(prefix="forks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.address = f"{folder}/requests"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as requests:
            requests.bind(self.address)
            requests.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(requests.fileno()), *imported],
                cwd=program,
                env={**os.environ, **environment},
                pass_fds=(requests.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self._end)

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
    confined()
    changed = {} if program == ROOT else {"PYTHONPATH": import_path(program)}
    return Forks(program, EXPORTING if exporting else TRAINING, **changed)


def confined() -> None:
    """Fork for the modules of `CONFINED`, here and in all forks, as long as this process lives."""
    if sys.platform == "linux" and CONFINED_AT not in os.environ:
        os.environ[CONFINED_AT] = Forks(ROOT, CONFINED, **process._FEW_THREADS).address


def forked(
    address: str,
    code: str,
    *arguments: object,
    environment: Mapping[str, str],
    given: str = "",
) -> subprocess.CompletedProcess[str] | None:
    """What `python -c CODE ARGUMENTS` comes to, or None if it needs a fresh process.

    given: its input.
    """
    words, start = ["-c", *map(str, arguments)], _read_at_start(environment)
    request = {"code": code, "words": words, "folder": str(Path.cwd()), "start": start}
    written = json.dumps({**request, "environment": dict(environment)}).encode()
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(given.encode())
        files[0].seek(0)
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        server.settimeout(MOST_S)
        server.connect(address)
        socket.send_fds(server, [written], [file.fileno() for file in files])
        answer = server.recv(64).decode()
        if not answer:
            raise RuntimeError("the process that forks has ended")
        if answer == FRESH:
            return None
        return subprocess.CompletedProcess(words, int(answer), *map(_text, files[1:]))


def import_path(program: Path) -> str:
    """A program's packages, and what tests import beside them."""
    return os.pathsep.join(map(str, (program, ROOT, ROOT / "tests")))


_ended = process.ended


def ended(
    command: list[str],
    environment: dict[str, str],
    given: str,
    told: Callable[[int, int], None],
) -> subprocess.CompletedProcess[str]:
    """As `process.ended`; a call into a module of `CONFINED` is a fork where that is possible."""
    function = command[-1]
    if function.rpartition(".")[0] in CONFINED:
        confined()
        code = f"import sys; from {process.CALLED} import main; sys.exit(main())"
        address = os.environ.get(CONFINED_AT)
        if address and (
            done := forked(address, code, function, environment=environment, given=given)
        ):
            return done
    return _ended(command, environment, given, told)


def _read_at_start(environment: Mapping[str, str]) -> list[Any]:
    variables = {n: v for n, v in environment.items() if n.startswith(READ_AT_START)}
    variables.pop("PYTHONPATH", None)
    path = [ROOT, *map(Path, reversed(_path(environment)))]
    program = [one for one in path if (one / "runtime" / "core" / "version.py").exists()][-1]
    limits = [list(resource.getrlimit(kind)) for kind in INHERITED]
    return [variables, str(program.resolve()), limits]


def _path(environment: Mapping[str, str]) -> list[str]:
    return [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace").read()


def _serve(requests: socket.socket, start: list[Any]) -> NoReturn:
    """Fork for every request; `start` is what this process has read at its start."""
    while True:
        connection, _ = requests.accept()
        with suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if os.fork() == 0:
            requests.close()
            _answer(connection, start)
        connection.close()


def _answer(connection: socket.socket, start: list[Any]) -> NoReturn:
    """Fork once more for a request, and tell how that fork has ended."""
    written, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
    request = json.loads(written)
    if request.pop("start") != start:
        connection.send(FRESH.encode())
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        connection.close()
        for target, source in enumerate(descriptors):
            os.dup2(source, target)
            os.close(source)
        _run_code(**request)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # whoever asked may have been killed
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run_code(code: str, words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """What a fork does; it ends as a process does that has run the code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [one for one in _path(environment) if one not in sys.path]
    sys.argv = words
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    sys.exit()


def _import(imported: Sequence[str]) -> None:
    for name in imported:
        module, _, attribute = name.partition(":")
        found = importlib.import_module(module)
        if attribute:
            getattr(found, attribute)


if __name__ == "__main__":
    from runtime.machine.backend import prepare

    start = _read_at_start(os.environ)
    prepare()  # before MLX is imported
    import gc

    import mlx.core

    _import(sys.argv[2:])
    if mlx.core.cuda.is_available():
        start = []  # so that all get fresh processes: CUDA, which MLX has begun, ends with a fork
    process.ended = ended
    os.fsync = os.fstat  # type: ignore[assignment]  # as in conftest.py
    gc.collect()
    gc.freeze()  # no fork has to look through what is imported
    _serve(socket.socket(fileno=int(sys.argv[1])), start)
