"""The footprint meter against memory that the test itself takes, drops and maps."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import darwin
from support.memory import touched
from support.waiting import wait_until

from runtime.core.errors import OnDeviceError
from runtime.machine import footprint as memory
from runtime.machine import glibc
from runtime.machine.footprint import Footprint, Meter, RusageInfoV4, TaskVmInfo, read_footprint

BLOCK_BYTES = 64 * 2**20
SLACK_BYTES = 4 * 2**20

STATUS = (
    b"Name:\tVmRSS: 1 kB\nVmPeak:\t  900 kB\nVmHWM:\t    7000 kB\nVmRSS:\t    6000 kB\n"
    b"RssAnon:\t    2000 kB\nRssFile:\t    3900 kB\nRssShmem:\t     100 kB\nVmData:\t   1 kB\n"
)


def samplers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "footprint-meter"}


def test_the_text_of_the_kernel_is_read() -> None:
    assert memory.parse_status(STATUS) == Footprint(2100 * 1024, 6000 * 1024, 7000 * 1024)
    with pytest.raises(ValueError):
        memory.parse_status(STATUS.replace(b"RssShmem", b"Other"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_reading_agrees_with_the_status_file() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {name: text for name, _, text in (line.partition(":") for line in lines)}
    wanted = (int(kib["RssAnon"].split()[0]) + int(kib["RssShmem"].split()[0])) * 1024
    reading = read_footprint()
    assert abs(reading.footprint_bytes - wanted) < SLACK_BYTES
    assert reading.footprint_bytes <= reading.rss_bytes <= reading.peak_rss_bytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_its_own_footprint() -> None:
    before = read_footprint().footprint_bytes
    child = os.fork()
    if child == 0:
        block = touched(BLOCK_BYTES)
        grown = read_footprint().footprint_bytes - before > BLOCK_BYTES // 2
        block.close()
        os._exit(0 if grown else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_of_a_graphics_card_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_besides", [])
    monkeypatch.setattr(memory, "_reader", lambda: lambda: Footprint(1000, 2000, 3000))
    held = [0]

    def on_the_card() -> int:
        return held[0]

    for _ in range(2):
        memory.count_besides(on_the_card)
    assert read_footprint() == Footprint(1000, 2000, 3000)
    held[0] = 70
    assert read_footprint() == Footprint(1070, 2070, 3070)


def test_the_peak_is_kept_after_the_memory_is_gone_until_it_is_reset() -> None:
    with Meter(interval_s=0.001) as meter:
        before = meter.now_bytes
        block = touched(BLOCK_BYTES)
        samples = meter.samples
        wait_until(lambda: meter.samples > samples + 2)
        block.close()
        assert abs(meter.now_bytes - before) < SLACK_BYTES
        assert meter.peak_bytes - before == pytest.approx(BLOCK_BYTES, abs=SLACK_BYTES)
        assert meter.peak_rss_bytes >= meter.peak_bytes
        meter.reset_peak()
        assert abs(meter.peak_bytes - before) < SLACK_BYTES
    assert not samplers()


def test_the_budget_is_compared_with_the_peak() -> None:
    now = read_footprint().footprint_bytes
    with Meter(budget_bytes=now + BLOCK_BYTES // 2) as meter:
        assert not meter.over_budget
        block = touched(BLOCK_BYTES)
        assert meter.now_bytes > now
        assert meter.over_budget
        block.close()
    assert meter.over_budget
    with Meter() as unlimited:
        assert not unlimited.over_budget


PLACED = """
import ctypes, sys
import numpy as np
from runtime.machine import glibc

fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
sizes = [(field, ctypes.c_size_t) for field in fields]
HeapCounts = type("mallinfo2", (ctypes.Structure,), {"_fields_": sizes})
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = HeapCounts
glibc.tune_heap(keep=True)
glibc.place_values(int(sys.argv[1]))
for nbytes in map(int, sys.argv[2:]):
    before = libc.mallinfo2().hblkhd
    blocks = [np.ones(nbytes // 8) for _ in range(8)]
    print((libc.mallinfo2().hblkhd - before) // nbytes)
    del blocks
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
@pytest.mark.parametrize("planned", [glibc.LONG_VALUE_BYTES, glibc.LONG_VALUE_BYTES - 8])
def test_long_values_are_mapped_and_short_ones_are_not(planned: int) -> None:
    sizes = [str(planned), str(planned // 8)]
    command = [sys.executable, "-c", PLACED, str(planned), *sizes]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    mapped = 8 if planned == glibc.LONG_VALUE_BYTES else 0
    assert [int(word) for word in found.stdout.split()] == [mapped, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_trimming_gives_the_heap_s_free_pages_back() -> None:
    blocks = [np.ones(1 << 17, dtype=np.float64) for _ in range(64)]  # 1 MB each, from the heap
    kept = blocks[1::2]
    full = read_footprint().footprint_bytes
    del blocks  # every other block is free, and none of them at the top
    assert full - read_footprint().footprint_bytes < BLOCK_BYTES // 4
    glibc.trim_heap()
    assert full - read_footprint().footprint_bytes > BLOCK_BYTES // 4
    assert all(float(block[0]) == 1.0 for block in kept)


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * BLOCK_BYTES)
    before = read_footprint().footprint_bytes
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert sum(view[:: mmap.PAGESIZE]) == BLOCK_BYTES // mmap.PAGESIZE
        assert read_footprint().footprint_bytes - before < SLACK_BYTES


def test_a_failed_sample_is_raised_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Footprint:
        raise OnDeviceError("no reading")

    with pytest.raises(OnDeviceError, match="no reading"), Meter(interval_s=0.001) as meter:
        monkeypatch.setattr(memory, "read_footprint", fail)
        wait_until(lambda: not samplers())
        assert meter.peak_bytes >= 0


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has the real library")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_darwin_s_figures_are_read_from_the_structures_of_the_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = darwin.build_library(tmp_path)
    sizes = (ctypes.c_ulong * 2).in_dll(ctypes.CDLL(str(library)), "sizes")
    assert [*sizes] == [ctypes.sizeof(TaskVmInfo), ctypes.sizeof(RusageInfoV4)]
    before, mapped_bytes = read_footprint(), memory.mapped_bytes()
    monkeypatch.setattr(memory, "LIBSYSTEM", str(library))
    monkeypatch.setattr(sys, "platform", "darwin")
    for cached in (memory._reader, memory._system_library):
        monkeypatch.setattr(memory, cached.__name__, cached.__wrapped__)
    found = read_footprint()
    assert abs(found.footprint_bytes - before.footprint_bytes) < SLACK_BYTES
    assert abs(found.rss_bytes - before.rss_bytes) < SLACK_BYTES
    assert abs(found.peak_rss_bytes - before.peak_rss_bytes) < SLACK_BYTES
    assert abs(memory.mapped_bytes() - mapped_bytes) < SLACK_BYTES
