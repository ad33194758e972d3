"""Functions in LLVM's language, as machine code for this processor.

LLVM runs in a process of its own (`runtime.machine.compiling_process`) the first time that a
processor meets a text. The code stays in the user's cache folder, and this process maps it: it
never loads LLVM, which would take 12 MB. `llvmlite` comes with the extra `llvmlite`.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.core.errors import StorageError, UsageError
from runtime.core.files import storage_errors
from runtime.core.paths import cache_folder, is_mine
from runtime.core.version import installed_version
from runtime.machine import compiling_process
from runtime.machine.processor import cpu_flags, model

Function = Any
"""It takes addresses and 64-bit integers, returns nothing, and has its own `address`."""
EXTRA = "pip install 'ondevice-tune[llvmlite]'"
DIGEST_BYTES = 32
NEEDED = {"avx2", "f16c", "fma"}  # which the texts' vectors become
PROBE = "define void @probe(ptr %at) {\n  store i64 42, ptr %at\n  ret void\n}\n"


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
        return f"llvmlite is not installed: {EXTRA}"
    given = ctypes.c_int64()
    try:
        function(PROBE, 1)(ctypes.addressof(given))
    except (UsageError, StorageError, OSError) as problem:
        return str(problem)
    return "" if given.value == 42 else "compiled code runs wrong"


def compile_all(texts: Iterable[str]) -> None:
    """Compile the texts that this processor has not met.

    Raises:
        UsageError: LLVM does not compile them.
        StorageError: the cache folder cannot be written.
    """
    missing = {text: path for text in texts if _read(path := _path(text)) is None}
    if not missing:
        return
    folder = next(iter(missing.values())).parent
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.TemporaryDirectory(".partial", dir=folder)
    with unfinished as temporary:
        given, said = Path(temporary, "texts"), Path(temporary, "said")
        parts = [Path(temporary, path.name) for path in missing.values()]
        with storage_errors(folder):
            given.write_text("\0".join(missing))
        if (reason := _compile(given, parts, said)) is not None:
            raise UsageError(
                f"llvmlite is installed and cannot compile ({reason}): {EXTRA}, or do without: "
                "pip uninstall llvmlite"
            )
        with storage_errors(folder):
            for part, path in zip(parts, missing.values(), strict=True):
                part.rename(path)


def _compile(given: Path, parts: list[Path], said: Path) -> str | None:
    """Compile a file's texts in a process of its own; returns why not, if it did not."""
    if not sys.executable:
        return "this Python does not know its own program"
    command = [sys.executable, "-P", compiling_process.__file__, *map(str, (given, *parts))]
    out = (os.POSIX_SPAWN_OPEN, 2, str(said), os.O_WRONLY | os.O_CREAT, 0o600)
    try:  # not `subprocess`, which takes 0.5 MB
        process = os.posix_spawn(sys.executable, command, os.environ, file_actions=[out])
    except OSError as problem:
        return f"{sys.executable}: {problem.strerror}"
    try:
        failed = os.waitpid(process, 0)[1] != 0
    except ChildProcessError:  # it has ended, and the system keeps no status (SIGCHLD is ignored)
        failed = False
    if not failed and all(part.exists() for part in parts):
        return None
    return (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


@cache
def function(text: str, arguments: int) -> Function:
    """`load`, once for each text, which stays in memory."""
    return load(text, arguments)


def load(text: str, arguments: int) -> Function:
    """The function that a text defines, which takes so many addresses or 64-bit integers.

    Raises:
        UsageError: LLVM does not compile it.
        StorageError: the cache folder cannot be written or does not keep the code.
        OSError: the system does not let code be mapped.
    """
    import numpy as np

    compile_all([text])
    code = _read(path := _path(text))
    if code is None:
        raise StorageError(f"{path} was damaged or removed as it was written")
    rights = mmap.PROT_READ | mmap.PROT_EXEC
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, rights)
    octets = np.frombuffer(mapped, np.uint8)
    made: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(octets.ctypes.data)
    made.mapped = octets  # as long as the function can be called
    made.address = octets.ctypes.data
    return made


def _read(path: Path) -> bytes | None:
    """The code in a file of the cache folder; None if it is not there, not read, or not whole."""
    if not is_mine(path):
        return None
    try:
        octets = path.read_bytes()
    except OSError:  # another process has removed it, or something else has its name
        return None
    code, digest = octets[:-DIGEST_BYTES], octets[-DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _path(text: str) -> Path:
    return cache_folder() / "code" / hashlib.sha256(f"{text}\0{_setting()}".encode()).hexdigest()


@cache
def _setting() -> str:
    """All that decides the code of a text."""
    rules = Path(compiling_process.__file__).read_text()
    return "\0".join((model(), installed_version("llvmlite"), rules))
