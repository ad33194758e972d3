"""Machine code: compiled once, kept, checked, and refused where it cannot run."""

from __future__ import annotations

import ctypes
import errno
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from support.compiled import require_compiled

from runtime.arrays import attention_text, compiled_gates, packed_rows, product_text
from runtime.core.errors import BudgetError, UsageError
from runtime.machine import compiling_process, machine_code
from runtime.machine.machine_code import Text, compile_all, function, lacking, why_not_kept

# constants that lie beside the code, which has to find them
TABLE = """
@table = private constant [4 x i64] [i64 {first}, i64 20, i64 30, i64 40]
define void @looked_up(ptr %to, i64 %index) {{
  %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %index
  %value = load i64, ptr %at
  store i64 %value, ptr %to
  ret void
}}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    require_compiled()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lacking.cache_clear()
    function.cache_clear()
    monkeypatch.setattr(machine_code, "_own", {})
    monkeypatch.setattr(machine_code, "_refusals", [])
    return tmp_path / "ondevice/code"


def looked_up(text: str | Text, index: int) -> int:
    value = ctypes.c_int64()
    function(text, 2)(ctypes.addressof(value), index)
    return value.value


def test_code_is_compiled_once_and_again_if_it_is_damaged(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [TABLE.format(first=first) for first in (7, 8)]
    compile_all(texts)
    assert [looked_up(text, 0) for text in texts] == [7, 8]
    assert looked_up(texts[0], 3) == 40
    files = sorted(own_cache.iterdir())
    assert len(files) == 2  # nothing else is left
    octets = files[0].read_bytes()
    files[0].write_bytes(bytes([octets[0] ^ 1]) + octets[1:])
    function.cache_clear()
    assert [looked_up(text, 0) for text in texts] == [7, 8]
    assert files[0].read_bytes() == octets

    def nothing(*_: object, **__: object) -> int:
        raise AssertionError("it is compiled again")

    monkeypatch.setattr("os.posix_spawn", nothing)
    compile_all(texts)


def test_a_text_is_written_once_for_its_settings_and_the_sources(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = []

    def write(first: int) -> str:
        wrote.append(first)
        return TABLE.format(first=first)

    def looked_up_anew(first: int) -> int:
        function.cache_clear()
        return looked_up(Text(write, (first,)), 0)

    assert [looked_up_anew(first) for first in (7, 8, 7, 8)] == [7, 8, 7, 8]
    assert wrote == [7, 8]
    monkeypatch.setattr(machine_code, "_WRITERS_DIGEST", "changed")
    assert looked_up_anew(7) == 7 and wrote == [7, 8, 7]


KIND = ("g", "u", "d"), ("dg", "du")


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (product_text.text_of, (True, 4, 32, "bfloat16", True, product_text.NARROW)),
        (attention_text.text_of, (True, 2.5, 8)),
        (compiled_gates.text_of, ((1.5, 0.5), *KIND, 8)),
        (packed_rows.text_of, (4, 64, "symmetric", "float32", 2)),
    ],
)
def test_texts_follow_from_the_sources_by_which_code_is_found(
    write: Callable[..., str], settings: tuple[object, ...]
) -> None:
    """All functions that run, and all that their modules import of ours."""
    modules = set[str]()

    def seen(frame: FrameType, event: str, argument: object) -> None:
        modules.add(frame.f_globals["__name__"])

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        write(*settings)
    finally:
        sys.setprofile(before)
    ours = {name for name in modules if name.startswith("runtime.")}
    assert write.__module__ in ours and "runtime.machine.llvm_code" in ours
    for name in sorted(ours):
        source = Path(str(sys.modules[name].__file__)).read_text()
        imported = re.findall(r"^from (runtime\.\w+)", source, re.MULTILINE)
        assert {*imported} <= {f"runtime.{folder}" for folder in machine_code.WRITERS}, name


def test_what_cannot_be_compiled_or_mapped_is_said(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"cannot compile .*pip uninstall llvmlite"):
        function("define void @f() { ret i32 }", 0)
    calls = "declare void @elsewhere()\ndefine void @f() {\n  call void @elsewhere()\n  ret void\n}"
    with pytest.raises(UsageError, match="the code refers to something else"):
        function(calls, 0)
    assert not own_cache.exists()
    assert lacking() == ""

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    lacking.cache_clear()
    function.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr("runtime.machine.machine_code.mmap.mmap", forbidden)
        assert "not permitted" in lacking()
    lacking.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(machine_code, "find_spec", lambda name: None)
        assert "pip install --force-reinstall llvmlite" in lacking()
    lacking.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr("platform.machine", lambda: "riscv64")
        assert "this is linux on riscv64" in lacking()
    lacking.cache_clear()


def test_a_process_that_does_not_compile_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken, killed = tmp_path / "broken", tmp_path / "killed"
    for program, number in ((broken, signal.SIGTERM), (killed, signal.SIGKILL)):
        program.write_text(f"#!/bin/sh\nkill -{int(number)} $$\n")
        program.chmod(0o755)
    for program, reason in (
        ("", "does not know its own program"),
        ("/nowhere", "/nowhere: No such file"),
        ("/bin/true", "it said nothing"),
        (str(broken), "SIGTERM ended it"),
    ):
        monkeypatch.setattr("sys.executable", program)
        with pytest.raises(UsageError, match=rf"cannot compile \(.*{reason}"):
            compile_all([TABLE.format(first=1)])
    monkeypatch.setattr("sys.executable", str(killed))
    with pytest.raises(BudgetError, match=r"memory is short: it takes .* pip uninstall llvmlite$"):
        compile_all([TABLE.format(first=1)])


def is_a_file(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code.parent.write_text("no folder")


def is_full(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)


def is_nowhere(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", no_home)


def has_a_folder_in_place_of_code(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up(TABLE.format(first=4), 0)
    (kept,) = code.iterdir()
    kept.unlink()
    kept.mkdir()
    function.cache_clear()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (is_a_file, "cannot write"),
        (is_full, "the disk is full"),
        (is_nowhere, "no home directory"),
        (has_a_folder_in_place_of_code, "directory"),
    ],
)
def test_code_runs_where_the_cache_folder_does_not_keep_it(
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    spoil(own_cache, monkeypatch)
    assert not why_not_kept()
    assert looked_up(text := TABLE.format(first=4), 0) == 4
    assert reason in why_not_kept() and "set XDG_CACHE_HOME" in why_not_kept()
    function.cache_clear()
    monkeypatch.setattr("os.posix_spawn", None)  # this process has it
    assert looked_up(text, 1) == 20


def test_code_runs_from_memory_where_the_cache_folder_forbids_it(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    mmap = machine_code.mmap.mmap

    def not_from_disk(file: int, *rest: int) -> object:
        tried.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        if tried[-1].startswith(str(own_cache)):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return mmap(file, *rest)

    monkeypatch.setattr("runtime.machine.machine_code.mmap.mmap", not_from_disk)
    assert looked_up(TABLE.format(first=5), 0) == 5
    assert len(tried) == 2 and len([*own_cache.iterdir()]) == 1 and not why_not_kept()


def test_a_status_that_the_system_does_not_keep_is_not_needed() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert looked_up(TABLE.format(first=3), 0) == 3
        with pytest.raises(UsageError, match="cannot compile"):
            function("define void @f() { ret i32 }", 0)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_old_llvm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    monkeypatch.setattr("llvmlite.binding.llvm_version_info", (15, 0, 7))
    with pytest.raises(SystemExit, match="LLVM 15 is too old: 20 is needed"):
        compiling_process.main("", "")
    assert score.read_text() == before  # which only a process of its own changes
