"""This machine and its process as a plan counts them; and the device that a bundle needs."""

from __future__ import annotations

import resource
import sys
from contextlib import nullcontext

import mlx.core as mx
import pytest
from support.memory import touched

from runtime.core.errors import BudgetError, UsageError
from runtime.machine import backend
from runtime.machine.backend import (
    ROUNDED_TO_BYTES,
    limit_memory,
    no_blas,
    round_up,
    this_machine,
    use_device,
)
from runtime.machine.footprint import read_footprint

HELD_BYTES = 50_000_000
NOISE_BYTES = 4_000_000  # what the process of the tests gives back or takes meanwhile


def test_the_process_is_read_in_the_process() -> None:
    this_machine("cpu", "auto")  # gives back what is free
    before = this_machine("cpu", "auto").process_bytes
    held = touched(HELD_BYTES)
    now = this_machine("cpu", "auto").process_bytes
    assert now - before == pytest.approx(HELD_BYTES, abs=NOISE_BYTES)
    reading = read_footprint().footprint_bytes
    assert reading - NOISE_BYTES < now < reading + NOISE_BYTES
    held.close()
    assert this_machine("cpu", "auto").process_bytes == pytest.approx(before, abs=NOISE_BYTES)


def test_a_reading_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings of equal processes differ a little; the plan is the same, and for the larger."""
    for reading in (0, 1, 31_415_926, 31_400_000, 31_399_999, 1 << 40):
        found = round_up(reading)
        assert found % ROUNDED_TO_BYTES == 0
        assert reading < found <= reading + 2 * ROUNDED_TO_BYTES
    assert round_up(31_415_926) == round_up(31_450_000) == 31_600_000
    footprint = read_footprint()
    monkeypatch.setattr(backend, "read_footprint", lambda: footprint)
    assert this_machine("cpu", "auto").process_bytes == round_up(footprint.footprint_bytes)


@pytest.mark.parametrize(
    ("device", "asked", "arithmetic"),
    [
        ("cpu", "auto", "unpacked"),
        ("gpu", "auto", "packed"),
        ("cpu", "packed", "packed"),
        ("gpu", "unpacked", "unpacked"),
    ],
)
def test_arithmetic_is_the_device_s_unless_it_is_asked_for(
    device: str, asked: str, arithmetic: str
) -> None:
    found = this_machine(device, asked)
    assert (found.device, found.arithmetic) == (device, arithmetic)
    heap = "glibc" if sys.platform == "linux" else "mlx"
    metal = "metal" if sys.platform == "darwin" else "mlx"
    assert found.allocator == (heap if device == "cpu" else metal)


def test_a_gpu_is_loaded_before_its_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an operation of each kind, on the GPU; a CPU loads nothing."""
    evaluated: list[int] = []
    evaluate = mx.eval

    def counted(*arrays: object) -> None:
        evaluated.append(len(arrays))
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "gpu", mx.cpu)
    footprint = read_footprint()
    order: list[int] = []
    monkeypatch.setattr(
        backend, "read_footprint", lambda: order.append(len(evaluated)) or footprint
    )
    this_machine("cpu", "auto")
    this_machine("gpu", "auto")
    assert order == [0, 1]


def test_graphs_for_a_gpu_that_is_not_here_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "is_available", lambda device: False)
    with pytest.raises(UsageError, match="traced for a GPU, and MLX finds none here"):
        use_device("gpu")


def test_too_few_addresses_for_libraries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS would end the process, and the C++ library abort it."""
    for limits, refused in (((512_000_000, -1), True), ((1 << 30, -1), False), ((-1, -1), False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        with pytest.raises(BudgetError, match="512 MB of addresses") if refused else nullcontext():
            backend.prepare()


def test_a_macs_memory_limit_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There MLX would empty its cache as well."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(mx, "set_memory_limit", lambda limit: pytest.fail("it was set"))
    with backend.bounded_run_ahead(1):
        pass


def test_nothing_runs_under_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU MLX would spin wherever a limit is reached; a GPU's is left as it is."""
    monkeypatch.setattr(backend, "_planned", [0])
    cache, memory = mx.set_cache_limit(0), mx.set_memory_limit(0)
    try:
        mx.set_memory_limit(7_000_000)
        limit_memory("gpu", 3_000_000, 2_000_000)
        assert mx.set_memory_limit(0) == 7_000_000
        limit_memory("cpu", 3_000_000, 2_000_000)
        assert mx.set_memory_limit(0) > 1 << 50
        assert mx.set_cache_limit(0) == 2_000_000
    finally:
        mx.set_cache_limit(cache)
        mx.set_memory_limit(memory)


@pytest.mark.parametrize(
    ("processor", "package"),
    [("x86_64", "libgfortran5"), ("aarch64", "libopenblas0-pthread")],
)
def test_a_missing_blas_is_advised_by_the_processor(processor: str, package: str) -> None:
    """Our packages bring OpenBLAS for x86-64 alone, without its Fortran library."""
    assert no_blas(processor).endswith(f"install {package} (Debian, Ubuntu: apt install {package})")


@pytest.mark.parametrize(
    ("name", "device"),
    [("", "cpu"), ("Apple M2", "gpu"), ("Apple Paravirtual device", "cpu")],
)
def test_a_gpu_is_taken_unless_it_is_a_virtual_mac_s(
    monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    monkeypatch.setattr(backend, "gpu_name", lambda: name)
    assert backend.automatic_device() == device
