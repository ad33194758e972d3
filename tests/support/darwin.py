"""Linux that looks like macOS to Python: what macOS lacks is gone, and what it has is imitated.

`pretend` changes the process that calls it, and by `darwin_site/sitecustomize.py` all Python
processes that it starts. `make test-darwin` runs the tests so. The C library, the heap, files and
MLX remain those of Linux.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import fcntl
import mmap
import multiprocessing
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

PRETENDS = "ONDEVICE_TEST_DARWIN"  # an environment variable: the folder with the imitated library
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
SITE = Path(__file__).with_name("darwin_site")
SOURCE = Path(__file__).with_name("libSystem.c")

# What CPython 3.11 for macOS lacks, of that which it has on Linux
LACKING = {
    os: [
        *(name for name in dir(os) if name.startswith(("POSIX_FADV_", "SCHED_", "sched_", "MFD_"))),
        *("copy_file_range", "eventfd", "eventfd_read", "eventfd_write", "fdatasync"),
        *("getrandom", "getresgid", "getresuid", "getxattr", "listxattr", "memfd_create"),
        *("pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate", "removexattr"),
        *("setns", "setresgid", "setresuid", "setxattr", "splice", "unshare", "waitid"),
        *("P_PID", "P_ALL", "P_PGID", "P_PIDFD", "WNOWAIT", "WEXITED", "WSTOPPED", "O_DIRECT"),
    ],
    resource: ["prlimit", "RUSAGE_THREAD", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE"],
    signal: ["sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGPWR", "SIGSTKFLT", "SIGPOLL"],
    select: ["epoll"],
    time: ["CLOCK_BOOTTIME", "CLOCK_TAI"],
    mmap: ["MADV_DODUMP", "MADV_DONTDUMP", "MADV_DONTFORK", "MADV_DOFORK", "MADV_HUGEPAGE"],
}

F_PREALLOCATE, F_FULLFSYNC, F_BARRIERFSYNC = 42, 51, 85
FLUSHES: list[int] = []  # the commands by which files were flushed


def build_library(folder: Path) -> Path:
    """Compile the imitated libSystem into a folder."""
    library = folder / "libSystem.B.dylib"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


def pretend() -> None:
    """Make this process, and all that it starts, look like one on macOS."""
    if sys.platform == "darwin":
        return
    if PRETENDS not in os.environ or not Path(os.environ[PRETENDS], "libSystem.B.dylib").exists():
        folder = Path(tempfile.mkdtemp(prefix="ondevice-darwin-"))
        build_library(folder)
        os.environ[PRETENDS] = str(folder)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, paths)])
    os.environ.setdefault("MLX_MPI_LIBNAME", ctypes.util.find_library("mpi") or "")
    multiprocessing.get_start_method()  # chosen by the platform, as
    sysconfig.get_config_vars()  # what is read by its name
    _load_blas()
    allocate = getattr(os, "posix_fallocate")  # noqa: B009 - mypy knows that macOS lacks it
    sync, control, load = os.fsync, fcntl.fcntl, ctypes.CDLL

    def fcntl_of_darwin(fd: Any, command: int, argument: Any = 0) -> Any:
        if command in (F_FULLFSYNC, F_BARRIERFSYNC):
            FLUSHES.append(command)
            return sync(fd)
        if command == F_PREALLOCATE:
            _, _, _, missing, _ = struct.unpack("Iiqqq", argument)
            size = os.fstat(fd).st_size
            allocate(fd, 0, 512 * os.fstat(fd).st_blocks + missing)
            os.ftruncate(fd, size)  # as there, it reserves disk beyond the end
            return argument
        return control(fd, command, argument)

    class Library(load):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
            imitated = str(Path(os.environ[PRETENDS], "libSystem.B.dylib"))
            super().__init__(imitated if name == LIBSYSTEM else name, *arguments, **options)

    fcntl.fcntl = fcntl_of_darwin
    ctypes.CDLL = Library  # type: ignore[misc]
    for module, names in LACKING.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    proxies = ModuleType("_scproxy")  # of urllib
    vars(proxies).update(_get_proxies=dict, _get_proxy_settings=dict)
    sys.modules["_scproxy"] = proxies
    vars(shutil)["_copyxattr"] = lambda *_, **__: None  # as it is where os has no such calls
    platform.machine = lambda: "arm64"
    platform.mac_ver = lambda *_: ("15.0", ("", "", ""), "arm64")
    sys.addaudithook(_no_proc)
    sys.platform = "darwin"


def _no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).startswith("/proc/"):
        caller = sys._getframe(1)
        if "/ctypes/" not in caller.f_code.co_filename:
            raise FileNotFoundError(2, "there is no /proc on macOS", arguments[0])


def _load_blas() -> None:
    """Load what replaces Accelerate, before MLX loads its own slow BLAS."""
    for entry in sys.path:
        for library in Path(entry, "ngsolve_openblas").glob("libopenblas*.so*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return


if shutil.which("cc") is None and PRETENDS in os.environ:
    raise RuntimeError("the tests as on macOS need a C compiler")
