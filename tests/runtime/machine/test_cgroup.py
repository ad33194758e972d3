"""The limit of a process's control group, as both versions of them and containers show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.machine.cgroup import memory_limit_bytes

OTHERS = "22 1 0:20 / /proc rw,nosuid - proc proc rw\n"
ONE = "35 31 0:32 {root} {folder} rw,relatime shared:7 - cgroup cgroup rw,memory\n"
ANOTHER = "36 31 0:33 / /cpu rw,relatime - cgroup cgroup rw,cpu\n"
TWO = "41 31 0:38 {root} {folder} rw,relatime - cgroup2 cgroup2 rw\n"
NONE_V1, NONE_V2 = str((1 << 63) - 4096), "max"
V1, V2 = "memory.limit_in_bytes", "memory.max"


def limit(
    tmp_path: Path, mount: str, groups: str, limits: dict[str, str], file: str, root: str = "/"
) -> int | None:
    """The limit that is found, where groups have these limits."""
    process, folder = tmp_path / "self", tmp_path / "groups"
    process.mkdir()
    for group, text in limits.items():
        (folder / group).mkdir(parents=True, exist_ok=True)
        (folder / group / file).write_text(f"{text}\n")
    mounts = OTHERS + mount.format(root=root, folder=folder) + ANOTHER
    (process / "mountinfo").write_text(mounts)
    (process / "cgroup").write_text(groups)
    return memory_limit_bytes(process)


OF_V1 = (ONE, "9:name=systemd:/x\n4:cpu,memory:/a/b\n1:cpu:/other\n0::/other\n", V1)
OF_V2 = (TWO, "0::/a/b\n", V2)


@pytest.mark.parametrize(
    ("version", "limits", "expected"),
    [
        (OF_V1, {"a/b": "100"}, 100),
        (OF_V1, {"a/b": "100", "a": "300"}, 100),
        (OF_V1, {"a/b": "300", "a": "100"}, 100),
        (OF_V1, {"a/b": NONE_V1, "a": "100", ".": NONE_V1}, 100),
        (OF_V1, {"a/b": NONE_V1, "a": NONE_V1}, None),
        (OF_V1, {"other": "100"}, None),
        (OF_V2, {"a/b": "100"}, 100),
        (OF_V2, {"a/b": NONE_V2, "a": "300"}, 300),
        (OF_V2, {"a/b": NONE_V2, "a": NONE_V2}, None),
    ],
)
def test_the_smallest_limit_counts_of_a_group_and_those_around_it(
    tmp_path: Path, version: tuple[str, str, str], limits: dict[str, str], expected: int | None
) -> None:
    mount, groups, file = version
    assert limit(tmp_path, mount, groups, limits, file) == expected


@pytest.mark.parametrize(("mount", "number", "file"), [(ONE, "4:memory", V1), (TWO, "0:", V2)])
@pytest.mark.parametrize(
    ("root", "group"),
    [
        ("/docker/1f", "/docker/1f"),  # the container sees its group's name outside
        ("/", "/"),  # it has a name space of its own
        ("/docker/1f", "/elsewhere"),  # the process is in a group that is not mounted here
        ("/", "/../outside"),
    ],
)
def test_inside_a_container(
    tmp_path: Path, mount: str, number: str, file: str, root: str, group: str
) -> None:
    groups = f"{number}:{group}\n"
    assert limit(tmp_path, mount, groups, {".": "4096", "inner": "1"}, file, root) == 4096


def test_without_control_groups(tmp_path: Path) -> None:
    assert memory_limit_bytes(tmp_path / "nothing") is None
    assert limit(tmp_path, "", "", {}, V1) is None
