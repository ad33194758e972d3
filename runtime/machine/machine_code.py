"""Functions in LLVM's language, as machine code for this processor.

LLVM runs in a process of its own (`runtime.machine.compiling_process`) the first time that a
processor meets a text. The code stays in the user's cache folder, and this process maps it: it
never loads LLVM, which would take 12 MB, and mostly writes no text either (`Text`). Where that
folder cannot be written, or forbids code to be mapped, the code is in memory (4 KB each).
`llvmlite` is installed with us.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from runtime.core.errors import BudgetError, StorageError, UsageError
from runtime.core.files import storage_errors
from runtime.core.paths import cache_folder, is_mine
from runtime.core.version import installed_version
from runtime.machine import compiling_process
from runtime.machine.processor import cpu_flags, model

Function = Any
"""It takes addresses and 64-bit integers, returns nothing, and has its own `address`."""
INSTALL = "pip install --force-reinstall llvmlite"
DIGEST_BYTES = 32
LLVM_MB = 21  # of the compiling process, as measured, and 70 MB of pages that may be dropped
_own: dict[str, bytes] = {}  # code that the cache folder does not keep, by its name there
_refusals: list[str] = []  # why it does not

WRITERS = ("arrays", "machine")  # folders of `runtime` in which texts are written
NEEDED = {"avx2", "f16c", "fma"}  # which the texts' vectors become
PROBE = "define void @probe(ptr %at) {\n  store i64 42, ptr %at\n  ret void\n}\n"


class Text(NamedTuple):
    """A text that `write(*settings)` returns: it is written only where its code is not there.

    The code is found by these settings, and by the sources of all that writes texts.
    """

    write: Callable[..., str]
    settings: tuple[object, ...]


def is_built_for() -> bool:
    """Whether texts are compiled for such a system and processor."""
    return (sys.platform, platform.machine()) == ("linux", "x86_64")


@cache
def lacking() -> str:
    """Why no text can be compiled and run here; empty if it can."""
    if not is_built_for():
        here = f"{sys.platform} on {platform.machine()}"
        return f"it is built for Linux on x86-64, and this is {here}"
    if absent := sorted(NEEDED - set(cpu_flags())):
        return f"the processor lacks {', '.join(absent)}"
    if find_spec("llvmlite") is None:
        return f"llvmlite is not installed: {INSTALL}"
    returned = ctypes.c_int64()
    try:
        function(PROBE, 1)(ctypes.addressof(returned))
    except (UsageError, StorageError, OSError) as problem:
        return str(problem)
    return "" if returned.value == 42 else "compiled code runs wrong"


def compile_all(texts: Iterable[str | Text]) -> None:
    """Compile the texts that this processor has not met.

    Raises:
        UsageError: LLVM does not compile them.
        OSError: the system has no files in memory.
    """
    names: dict[str, None] = {}
    with _in_memory() as source:
        for text in texts:  # of which one is in memory at a time: they may have 100 KB
            if (name := _name(text)) not in names and _code(name) is None:
                written = text if isinstance(text, str) else text.write(*text.settings)
                source.write(b"\0" * bool(names) + written.encode())
                names[name] = None
        source.flush()
        if names:
            _keep(dict(zip(names, _compiled(source, len(names)), strict=True)))


def why_not_kept() -> str:
    """Why code that this process runs is not in the cache folder; empty if it is, or nothing is."""
    return _refusals[0] if _refusals else ""


def _compiled(source: IO[bytes], count: int) -> list[bytes]:
    """The code of so many texts and its checksums, compiled in a process of its own."""
    with ExitStack() as files:
        said, *made = [files.enter_context(_in_memory()) for _ in range(1 + count)]
        reason = _run([source, *made], said)
        codes = [_whole(file) for file in made]
        if not reason and all(_is_sound(octets) for octets in codes):
            return codes
        lines = [reason] if reason else _whole(said).decode(errors="replace").strip().splitlines()
    raise UsageError(
        f"llvmlite is installed and cannot compile ({(lines or ['it said nothing'])[-1]}): "
        f"{INSTALL}, or do without: pip uninstall llvmlite"
    )


def _run(files: Sequence[IO[bytes]], said: IO[bytes]) -> str:
    """Run the compiling process; returns why it was not started or not run to its end, if so.

    Raises:
        BudgetError: the system has ended it by SIGKILL.
    """
    if not sys.executable:
        return "this Python does not know its own program"
    places = [f"/proc/self/fd/{file.fileno()}" for file in files]
    command = [sys.executable, "-P", compiling_process.__file__, *places]
    out = (os.POSIX_SPAWN_DUP2, said.fileno(), 2)
    try:  # not `subprocess`, which takes 0.5 MB
        process = os.posix_spawn(sys.executable, command, os.environ, file_actions=[out])
    except OSError as problem:
        return f"{sys.executable}: {problem.strerror}"
    with suppress(ChildProcessError):  # it has ended, and the system keeps no status
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code == -signal.SIGKILL:
            raise BudgetError(
                "the system has ended the process that compiles code for this processor, as where "
                f"memory is short: it takes {LLVM_MB} MB beside this one; raise the memory limit "
                "(of the container or control group) until a training has begun: the code stays in "
                "the cache folder (XDG_CACHE_HOME, else ~/.cache) where that can be written; or do "
                "without: pip uninstall llvmlite"
            )
        if code < 0:
            return f"{signal.Signals(-code).name} ended it"
    return ""


def _in_memory() -> IO[bytes]:
    """A file in memory, which processes that this one starts can open too."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("ondevice", 0), "w+b")
    raise AssertionError("texts are compiled on Linux alone")


def _whole(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _keep(made: Mapping[str, bytes]) -> None:
    """Write code into the cache folder; where that fails, this process has it to itself."""
    try:
        folder = _folder()
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(".partial", dir=folder) as temporary:
                for name, octets in made.items():
                    part = Path(temporary, name)
                    part.write_bytes(octets)
                    part.rename(folder / name)
    except StorageError as problem:
        _own.update(made)
        _refusals.append(
            f"compiled code is not kept, so each process compiles it again: {problem} (set "
            "XDG_CACHE_HOME to a folder that can be written)"
        )


@cache
def function(text: str | Text, arguments: int) -> Function:
    """The function that a text defines, which takes so many addresses or 64-bit integers.

    Raises:
        UsageError: LLVM does not compile it.
        StorageError: another process damages or removes the code as it is written.
        OSError: the system does not let code be mapped.
    """
    import numpy as np

    compile_all([text])
    octets = np.frombuffer(_mapped(_name(text)), np.uint8)
    made: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(octets.ctypes.data)
    made.mapped = octets  # as long as the function can be called
    made.address = octets.ctypes.data
    return made


def _mapped(name: str) -> mmap.mmap:
    """The code of that name, where it can be run: in its file, or in memory."""
    rights, code = mmap.PROT_READ | mmap.PROT_EXEC, _code(name)
    if code is None:
        raise StorageError(f"{_folder() / name} was damaged or removed as it was written")
    if name not in _own:
        with suppress(OSError), Path(_folder(), name).open("rb") as file:  # or is not to be run
            return mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, rights)
    with _in_memory() as file:
        file.write(code)
        file.flush()
        return mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, rights)


def _code(name: str) -> bytes | None:
    """The code of that name; None if it is not there, not read, or not whole."""
    octets = _own.get(name, b"")
    try:
        if not octets and is_mine(path := _folder() / name):
            octets = path.read_bytes()
    except (OSError, StorageError):  # removed by another process, no file, or no home
        return None
    return octets[:-DIGEST_BYTES] if _is_sound(octets) else None


def _is_sound(octets: bytes) -> bool:
    code, digest = octets[:-DIGEST_BYTES], octets[-DIGEST_BYTES:]
    return bool(code) and hashlib.sha256(code).digest() == digest


def _folder() -> Path:
    return cache_folder() / "code"


def _name(text: str | Text) -> str:
    if isinstance(text, Text):
        write = text.write
        text = f"{write.__module__}.{write.__qualname__}{text.settings}\0{_WRITERS_DIGEST}"
    return hashlib.sha256(f"{text}\0{_setting()}".encode()).hexdigest()


def _writers() -> str:
    """The SHA-256 of all sources whose functions run while a text is written."""
    digest, runtime = hashlib.sha256(), Path(__file__).parents[1]
    for folder in WRITERS:
        for path in sorted((runtime / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


_WRITERS_DIGEST = _writers()  # now, while the files are those that this process imports


@cache
def _setting() -> str:
    """All that decides the code of a text."""
    rules = Path(compiling_process.__file__).read_text()
    return "\0".join((model(), installed_version("llvmlite"), rules))
