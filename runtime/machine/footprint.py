"""The footprint of this process: read once, or sampled for its peak.

Footprint is the memory that the process owns: on Linux `RssAnon + RssShmem` of
`/proc/self/status`, on Apple systems the kernel's `phys_footprint`. Pages of mapped files that
can be dropped (the weights of a bundle, a token file) are not in it. Where a graphics card has
memory of its own, what MLX holds there counts too. A sampled peak can miss a spike shorter than the
interval, so the kernel's own peak is carried beside it.

The Darwin half is written from Apple's public headers (`mach/task_info.h`,
`sys/resource.h`, `libproc.h`); it is tested against a library with their structures, but has not
been run on a Mac.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from runtime.core.errors import OnDeviceError


@dataclass(frozen=True)
class Footprint:
    """One reading, in bytes.

    `peak_rss_bytes` is the kernel's peak since the process started: `VmHWM` on Linux (resident
    size with file pages, an upper bound of the footprint), the lifetime maximum of
    `phys_footprint` on Darwin (exact).
    """

    footprint_bytes: int
    rss_bytes: int
    peak_rss_bytes: int


_besides: list[Callable[[], int]] = []


def count_besides(read: Callable[[], int]) -> None:
    """Count bytes that the system knows nothing of too, such as those of a graphics card."""
    if read not in _besides:
        _besides.append(read)


def read_footprint() -> Footprint:
    """The footprint of this process now.

    Raises OnDeviceError if the system offers no such figure.
    """
    own = _reader()()
    more = sum(read() for read in _besides)
    if not more:
        return own
    return Footprint(own.footprint_bytes + more, own.rss_bytes + more, own.peak_rss_bytes + more)


def mapped_bytes() -> int:
    """The address space of this process, which RLIMIT_AS bounds.

    Raises OnDeviceError or OSError if the system offers no such figure.
    """
    if sys.platform == "darwin":
        return int(_task_vm_info(_system_library()).virtual_size)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


@cache
def _reader() -> Callable[[], Footprint]:
    if sys.platform == "darwin":
        return _read_darwin
    try:
        _read_linux()
    except (OSError, ValueError) as error:
        raise OnDeviceError(
            f"the memory footprint cannot be measured on {sys.platform}: {error}; "
            "Linux (with /proc mounted) and Apple systems are supported"
        ) from error
    return _read_linux


# Linux. /proc/self is resolved when the file is opened, so a forked child needs its own.


@cache
def _status_fd(pid: int) -> int:
    return os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)


def _read_linux() -> Footprint:
    text = os.pread(_status_fd(os.getpid()), 8192, 0)
    return parse_status(text)


def parse_status(text: bytes) -> Footprint:
    """The figures in the text of a `/proc/PID/status`. Raises ValueError where one is missing."""
    # VmHWM, VmRSS, RssAnon, RssFile, RssShmem follow one another, each "Name:\t  123 kB\n"
    peak = text.index(b"VmHWM:")
    rss = text.index(b"VmRSS:", peak)
    anon = text.index(b"RssAnon:", rss)
    shared = text.index(b"RssShmem:", anon)
    footprint_kib = _kib(text, anon + 8) + _kib(text, shared + 9)
    return Footprint(footprint_kib * 1024, _kib(text, rss + 6) * 1024, _kib(text, peak + 6) * 1024)


def _kib(text: bytes, start: int) -> int:
    return int(text[start : text.index(b" kB", start)])


# Darwin.

LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
_TASK_VM_INFO = 22
_RUSAGE_INFO_V4 = 4


class TaskVmInfo(ctypes.Structure):
    """`struct task_vm_info` up to revision 1, the first with `phys_footprint`."""

    _fields_ = (
        ("virtual_size", ctypes.c_uint64),
        ("region_count", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("resident_size", ctypes.c_uint64),
        ("resident_size_peak", ctypes.c_uint64),
        # device, internal, external, reusable: now and peak; purgeable_volatile pmap, resident,
        # virtual; compressed now, peak, lifetime
        ("not_read", ctypes.c_uint64 * 14),
        ("phys_footprint", ctypes.c_uint64),
    )


class RusageInfoV4(ctypes.Structure):
    """`struct rusage_info_v4`; the fields between those read are counted, not named."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time_to_wired_size", ctypes.c_uint64 * 6),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("start_abstime_to_logical_writes", ctypes.c_uint64 * 20),
        ("lifetime_max_phys_footprint", ctypes.c_uint64),
        ("instructions_to_runnable_time", ctypes.c_uint64 * 6),
    )


@cache
def _system_library() -> ctypes.CDLL:
    system = ctypes.CDLL(LIBSYSTEM)
    pointer = ctypes.c_void_p
    system.task_info.argtypes = (ctypes.c_uint32, ctypes.c_uint32, pointer, pointer)
    system.proc_pid_rusage.argtypes = (ctypes.c_int, ctypes.c_int, pointer)
    return system


def _task_vm_info(system: ctypes.CDLL) -> TaskVmInfo:
    # the macro mach_task_self() reads this; a forked child gets a new port
    task = ctypes.c_uint32.in_dll(system, "mach_task_self_")
    info = TaskVmInfo()
    words = ctypes.c_uint32(ctypes.sizeof(info) // 4)  # natural_t units, in and out
    status = system.task_info(task, _TASK_VM_INFO, ctypes.byref(info), ctypes.byref(words))
    if status:
        raise OnDeviceError(f"task_info(TASK_VM_INFO) failed with kern_return_t {status}")
    return info


def _read_darwin() -> Footprint:
    system = _system_library()
    vm, usage = _task_vm_info(system), RusageInfoV4()
    if system.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, ctypes.byref(usage)):
        raise OnDeviceError("proc_pid_rusage(RUSAGE_INFO_V4) failed for this process")
    return Footprint(vm.phys_footprint, vm.resident_size, usage.lifetime_max_phys_footprint)


class Meter:
    """Samples the footprint from a daemon thread while the `with` block runs.

    `reset_peak` restarts the sampled peak only; the kernel's counts from the process's start.
    A failed reading ends sampling and is raised by the next property read, never dropped.
    """

    def __init__(self, interval_s: float = 0.004, budget_bytes: int | None = None) -> None:
        self._interval_s = interval_s
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._last = Footprint(0, 0, 0)
        self._peak_bytes = 0
        self._samples = 0

    def __enter__(self) -> Meter:
        self._sample()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="footprint-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if kind is None:
            self._sample()

    def _run(self) -> None:
        try:
            while not self._stop:  # an Event's wait runs dozens of lines of Python each time
                time.sleep(self._interval_s)
                self._sample()
        except Exception as error:
            self._failure = error

    def _sample(self) -> None:
        if self._failure is not None:
            raise self._failure
        with self._lock:  # read inside: a reading from before a reset must not count after it
            self._last = read_footprint()
            self._peak_bytes = max(self._peak_bytes, self._last.footprint_bytes)
            self._samples += 1

    @property
    def now_bytes(self) -> int:
        """The footprint at this moment (a fresh reading, which also counts for the peak)."""
        self._sample()
        return self._last.footprint_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest footprint seen since the block began or `reset_peak` was called."""
        if self._failure is not None:
            raise self._failure
        return self._peak_bytes

    @property
    def peak_rss_bytes(self) -> int:
        """The kernel's own peak since the process started, see Footprint."""
        if self._failure is not None:
            raise self._failure
        return self._last.peak_rss_bytes

    @property
    def samples(self) -> int:
        """How many readings were taken since the meter was made."""
        return self._samples

    @property
    def over_budget(self) -> bool:
        """Whether the peak is above `budget_bytes`; False where no budget was given."""
        return self._budget_bytes is not None and self.peak_bytes > self._budget_bytes

    def reset_peak(self) -> None:
        """Start the sampled peak again from the footprint of this moment."""
        with self._lock:
            self._peak_bytes = 0
        self._sample()
