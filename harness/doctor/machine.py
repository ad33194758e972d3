"""The machine: platform, cores, memory, heap, disk and the cache folder."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.doctor.finding import Finding, Status
from harness.measure.provenance import memory_bytes, processor_name, provenance
from runtime.core.errors import StorageError
from runtime.core.files import free_bytes
from runtime.core.paths import cache_folder, is_mine
from runtime.core.units import counted, format_bytes
from runtime.machine.backend import cores
from runtime.machine.cgroup import memory_limit_bytes

USUAL_BUDGET_BYTES = 1_000_000_000
LITTLE_DISK_BYTES = 2_000_000_000
LITTLE_CACHE_BYTES = 100_000_000
OLDEST_MACOS = 14  # MLX has no wheel for an older one
OLDEST_GLIBC = (2, 35)  # of MLX's wheel
BUSY = 0.5  # the share of the cores that others may use before it is said
MEMINFO = Path("/proc/meminfo")
IN_MEMORY = ("tmpfs", "ramfs")


def computer() -> Iterator[Finding]:
    """Findings on the machine, without loading MLX."""
    yield _platform()
    yield _heap()
    yield _cores()
    yield _memory()
    yield from _disks()
    yield _cache()
    if sys.platform == "darwin":
        text = "a Mac that nobody uses falls asleep, and training with it"
        yield Finding(
            "sleep", Status.OK, f"{text}; start it with: caffeinate -i ondevice train ..."
        )


def _platform() -> Finding:
    system, processor = sys.platform, platform.machine()
    where = provenance()
    text = (
        f"{platform.platform()}, Python {platform.python_version()}, ondevice {where['version']}"
        f"{', commit ' + where['commit'] if where['commit'] else ''}"
    )
    facts = {
        "platform": platform.platform(),
        "machine": processor,
        "python": platform.python_version(),
        **where,
    }
    if (system, processor) == ("darwin", "x86_64"):
        way = "a Mac needs Apple silicon, and a Python that is built for it"
        return Finding("platform", Status.BROKEN, text, way, facts)
    if system not in ("linux", "darwin"):
        return Finding("platform", Status.BROKEN, text, "use Linux or macOS", facts)
    if sys.platform == "darwin":
        version = platform.mac_ver()[0]
        text = f"{processor_name()}, macOS {version}; {text}"
        if int(version.partition(".")[0] or 0) < OLDEST_MACOS:
            way = f"MLX needs macOS {OLDEST_MACOS} or later: update macOS"
            return Finding("platform", Status.BROKEN, text, way, facts)
    return Finding("platform", Status.OK, text, facts=facts)


def _heap() -> Finding:
    name, version = platform.libc_ver()
    if sys.platform == "darwin":
        return Finding("heap", Status.OK, "MLX's own cache keeps freed memory")
    if name != "glibc":
        way = "predicted peaks were measured with glibc; leave room in the budget"
        text = f"the C library is {name or 'another than glibc'}"
        return Finding("heap", Status.WARNING, text, way)
    if tuple(map(int, version.split("."))) < OLDEST_GLIBC:
        way = "MLX's wheel needs glibc {}.{} or later: update the system".format(*OLDEST_GLIBC)
        return Finding("heap", Status.BROKEN, f"the C library is glibc {version}", way)
    return Finding("heap", Status.OK, f"glibc {version} keeps freed memory, and is told how")


def _cores() -> Finding:
    mine = cores()
    load = os.getloadavg()[0]
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    text = f"{mine} of {os.cpu_count()} for this process, load {load:.1f}"
    if threads:
        text += f", OPENBLAS_NUM_THREADS={threads}"
    facts = {"cores": mine, "load": load, "threads": threads}
    if mine and load > BUSY * mine:
        way = "other programs slow training down: end them, or set OPENBLAS_NUM_THREADS to the "
        way += "number of free cores"
        return Finding("cores", Status.WARNING, text, way, facts)
    return Finding("cores", Status.OK, text, facts=facts)


def _memory() -> Finding:
    total, free, limit = memory_bytes(), _available_bytes(), memory_limit_bytes()
    text = format_bytes(total)
    if free is not None:
        text += f", {format_bytes(free)} available"
    text += f", container limit {format_bytes(limit)}" if limit else ", no container limit"
    facts = {"memory_bytes": total, "available_bytes": free, "limit_bytes": limit}
    least = min(size for size in (total, free, limit) if size is not None)
    if least < USUAL_BUDGET_BYTES:
        way = f"give a --budget below {format_bytes(least)}; ondevice plan names the smallest"
        return Finding("memory", Status.WARNING, text, way, facts)
    return Finding("memory", Status.OK, text, facts=facts)


def _available_bytes() -> int | None:
    """The memory that programs can still take (Linux); None where the system does not say."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _disks() -> Iterator[Finding]:
    """Free disk where bundles and runs are written, and where files are only for a moment."""
    for name, path in (
        ("disk here", Path.cwd()),
        ("disk for temporary files", Path(tempfile.gettempdir())),
    ):
        free = free_bytes(path)
        text, facts = f"{_free(free)} in {path}", {"free_bytes": free}
        if not os.access(path, os.W_OK):
            yield Finding(name, Status.WARNING, f"{path} cannot be written", "use another folder")
        elif free is not None and free < LITTLE_DISK_BYTES:
            way = "bundles take the size of the weights, and runs need scratch files; make room"
            yield Finding(name, Status.WARNING, text, way, facts)
        elif name == "disk here" and _is_in_memory(path):
            way = "runs keep activations in files, which take memory there; train in another folder"
            yield Finding(name, Status.WARNING, f"{text}, which is memory", way, facts)
        else:
            yield Finding(name, Status.OK, text, facts=facts)


def _free(nbytes: int | None) -> str:
    """How much is free on a disk, for people."""
    return "free space not stated" if nbytes is None else f"{format_bytes(nbytes)} free"


def _is_in_memory(path: Path) -> bool:
    """Whether a folder's files are kept in memory (Linux)."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    kinds = {mount[1]: mount[2] for mount in mounts}
    real = path.resolve()
    for place in (real, *real.parents):
        if str(place) in kinds:
            return kinds[str(place)] in IN_MEMORY
    return False


def _cache() -> Finding:
    try:
        folder = cache_folder()
    except StorageError as problem:
        return Finding("cache folder", Status.WARNING, str(problem))
    there = folder
    while not there.exists():
        there = there.parent
    free = free_bytes(there)
    facts = {"folder": str(folder), "free_bytes": free}
    way = "set XDG_CACHE_HOME to another folder"
    if not os.access(there, os.W_OK):
        return Finding("cache folder", Status.WARNING, f"{there} cannot be written", way, facts)
    if folder.exists() and not is_mine(folder):
        text = f"{folder} belongs to another user, so nothing in it is trusted"
        return Finding("cache folder", Status.WARNING, text, way, facts)
    models = _count(folder / "graphs")
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    facts |= {"models": models, "bytes": taken}
    text = f"{folder}: graphs of {counted(models, 'bundle')}, {format_bytes(taken)}, {_free(free)}"
    if free is not None and free < LITTLE_CACHE_BYTES:
        return Finding("cache folder", Status.WARNING, text, "make room, or " + way, facts)
    return Finding("cache folder", Status.OK, text, facts=facts)


def _count(folder: Path) -> int:
    return sum(entry.is_dir() for entry in folder.iterdir()) if folder.is_dir() else 0
