"""Machine code: compiled once, kept, checked, and refused where it cannot run."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import pytest
from support.compiled import require_compiled

from runtime.core.errors import StorageError, UsageError
from runtime.machine import compiling_process, machine_code
from runtime.machine.machine_code import compile_all, function, lacking

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
    return tmp_path / "ondevice/code"


def looked_up(text: str, index: int) -> int:
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


def test_what_cannot_be_compiled_or_mapped_is_said(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"cannot compile .*pip uninstall llvmlite"):
        function("define void @f() { ret i32 }", 0)
    calls = "declare void @elsewhere()\ndefine void @f() {\n  call void @elsewhere()\n  ret void\n}"
    with pytest.raises(UsageError, match="the code refers to something else"):
        function(calls, 0)
    assert not list(own_cache.iterdir())
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
        assert "pip install 'ondevice-tune[llvmlite]'" in lacking()
    lacking.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr("platform.machine", lambda: "riscv64")
        assert "this is linux on riscv64" in lacking()
    lacking.cache_clear()


def test_a_process_that_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, reason in (
        ("", "does not know its own program"),
        ("/nowhere", "/nowhere: No such file"),
        ("/bin/true", "it said nothing"),
    ):
        monkeypatch.setattr("sys.executable", program)
        with pytest.raises(UsageError, match=rf"cannot compile \(.*{reason}"):
            compile_all([TABLE.format(first=1)])


def test_something_else_in_place_of_code_is_named(own_cache: Path) -> None:
    looked_up(text := TABLE.format(first=4), 0)
    (kept,) = own_cache.iterdir()
    kept.unlink()
    kept.mkdir()
    function.cache_clear()
    with pytest.raises(StorageError, match=r"cannot write .*directory"):
        function(text, 2)


def test_a_status_that_the_system_does_not_keep_is_not_needed() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert looked_up(TABLE.format(first=3), 0) == 3
        with pytest.raises(UsageError, match="cannot compile"):
            function("define void @f() { ret i32 }", 0)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_old_llvm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.binding.llvm_version_info", (15, 0, 7))
    with pytest.raises(SystemExit, match="LLVM 15 is too old: 20 is needed"):
        compiling_process.main("", "")
