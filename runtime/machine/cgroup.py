"""The memory that the kernel lets this process take: the limit of its control group (Linux).

A container, a systemd unit or a batch system puts a process into a control group. Beyond the lowest
limit of the group and of those above it, the kernel kills the process. It counts more than the
footprint: page tables and other memory of the kernel, and file pages, which it drops first.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PROCESS = Path("/proc/self")
UNLIMITED_BYTES = 1 << 60  # version 1 writes the largest multiple of a page where there is no limit


class _Mount(NamedTuple):
    """Where control groups are mounted: the folder, and which group it shows."""

    folder: Path
    group: str
    limit: str  # the name of the file that holds a group's limit


def memory_limit_bytes(process: Path = PROCESS) -> int | None:
    """The lowest limit of this process's control groups, in bytes; None if there is none.

    process: the folder of the process below /proc.
    """
    try:
        groups = (process / "cgroup").read_text(errors="surrogateescape").splitlines()
        mounts = (process / "mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None  # not Linux, or no /proc: there is no control group to be in
    limits: list[int] = []
    for line in groups:
        number, controllers, group = line.split(":", 2)
        for mount in map(_mount, mounts):
            if mount is None or (mount.limit == _V2) != (number == "0"):
                continue
            if number == "0" or "memory" in controllers.split(","):
                limits += _limits(mount, group)
    return min(limits, default=None)


_V1, _V2 = "memory.limit_in_bytes", "memory.max"


def _mount(line: str) -> _Mount | None:
    """A line of mountinfo, if it mounts control groups that bound memory."""
    fields, _, system = line.partition(" - ")
    _, _, _, group, folder, *_ = fields.split(" ")
    kind, _, options = system.split(" ", 2)
    if kind == "cgroup2":
        return _Mount(Path(folder), group, _V2)
    if kind == "cgroup" and "memory" in options.split(","):
        return _Mount(Path(folder), group, _V1)
    return None


def _limits(mount: _Mount, group: str) -> list[int]:
    """The limits of a group and of all above it, as far as the mount shows them."""
    folder = mount.folder
    inside = group.removeprefix(mount.group.rstrip("/")).strip("/")
    if group.startswith(mount.group) and ".." not in inside.split("/"):
        folder /= inside  # else a container's own group is what is mounted
    limits = []
    for place in (folder, *folder.parents):
        if not place.is_relative_to(mount.folder):
            break
        text = _read(place / mount.limit)
        if text.isdecimal() and int(text) < UNLIMITED_BYTES:
            limits.append(int(text))
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # the topmost group has no limit
