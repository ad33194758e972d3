"""Setting up the process and the device (BLAS, allocator, MLX's run-ahead), and describing both.

`prepare` must run before MLX is first imported. On Linux it loads an optimized BLAS in place of the
reference BLAS in MLX's wheel, and sets whether the heap keeps freed memory. On macOS it does almost
nothing, because MLX uses Accelerate there. It has not been run on a Mac so far.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.core.errors import BudgetError, UsageError
from runtime.core.units import format_bytes
from runtime.machine import footprint, machine_code
from runtime.machine.cgroup import memory_limit_bytes
from runtime.machine.compute_dtype import choose
from runtime.machine.footprint import read_footprint
from runtime.machine.glibc import trim_heap, tune_heap
from runtime.machine.machine import Blas, Machine
from runtime.machine.openblas import blas_threads
from runtime.machine.processor import cpu_flags

AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}

# The buffers into which OpenBLAS packs factors: a panel for each thread and, with several threads,
# 320 float32 columns of the factor that holds the tokens
PANEL_BYTES, ROW_BYTES = 1_100_000, 320 * 4
READING_NOISE_BYTES, ROUNDED_TO_BYTES = 100_000, 100_000
NO_LIMIT = 1 << 60  # more bytes than any machine has
# Addresses that a tiny training takes on Linux x86-64, most of them for libraries and stacks, and
# without which these end the process, or its first threads do: with 512 MB, not with 532
LEAST_ADDRESSES_BYTES = 525_000_000
# What CUDA's libraries and kernels take of a process once a step has loaded them all: measured on
# an H200, 440 MB in float32 and 600 MB in bfloat16
CUDA_BYTES = 650_000_000
# MLX may always run ahead by this share of what a plan has in use, or by these bytes if they are
# more: waiting for memory takes time, and in small models more than the operations themselves
AHEAD, LEAST_AHEAD_BYTES = 0.01, 100_000
_planned = [0]  # the bytes that `limit_memory` was last told

REFERENCE = "reference"  # the BLAS in MLX's wheel for Linux
TOO_LATE = (
    "MLX was imported before ondevice had set this process up: matrix products may run on MLX's "
    "own slow BLAS, and more memory may be taken than predicted; start Python again, and call "
    "ondevice.prepare(), or another function of ondevice, before anything imports mlx"
)
_prepared: list[str] = []  # the BLAS, once this process was set up in time


@dataclass(frozen=True)
class Prepared:
    """The result of `prepare`: the BLAS in use, and a warning if it is slow."""

    blas: str
    warning: str = ""


def no_blas(processor: str) -> str:
    """The warning where only the reference BLAS could be loaded.

    On x86-64 an optimized BLAS is among our packages, whose Fortran library may be missing;
    elsewhere it comes from the system alone.
    """
    package = "libgfortran5" if processor == "x86_64" else "libopenblas0-pthread"
    return (
        "no optimized BLAS could be loaded, matrix products run about 100 times slower; install "
        f"{package} (Debian, Ubuntu: apt install {package})"
    )


def prepare(keep_heap: bool = True) -> Prepared:
    """Set up BLAS and allocator. Call before anything imports `mlx.core`.

    `keep_heap` is for work that allocates the same sizes repeatedly, as training does. Without it
    freed memory goes back to the system at once, which keeps the peak of an export low.
    The first call in a process loads the BLAS; later ones say what it has found.

    Raises:
        BudgetError: this process may not take the addresses that libraries need.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= soft < LEAST_ADDRESSES_BYTES:  # negative where there is no limit
        raise BudgetError(
            f"this process may take {format_bytes(soft)} of addresses (RLIMIT_AS), and libraries "
            f"alone need {format_bytes(LEAST_ADDRESSES_BYTES)}, whatever the memory; raise the "
            "limit, as with: ulimit -v unlimited"
        )
    tune_heap(keep_heap)
    if _prepared:
        slow = _prepared[0] == REFERENCE
        return Prepared(_prepared[0], no_blas(platform.machine()) if slow else "")
    if "mlx.core" in sys.modules:
        return Prepared(_load_blas(), TOO_LATE)
    _prepared.append(_load_blas())
    return prepare(keep_heap)


def _load_blas() -> str:
    """Load an optimized BLAS, and have MLX evaluate depth first; returns the BLAS's name.

    MLX reads its variables once. With TF32, its default on GPUs that have it, float32 products have
    errors of 8e-4, which are larger than the differences that zeroth-order methods measure.
    """
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "1")
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    if sys.platform == "darwin":
        return "Accelerate"
    if platform.machine() == "x86_64" and cpu_flags() >= AVX512:
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
    return _load_wheel_blas() or _load_system_blas() or REFERENCE


def _load_wheel_blas() -> str:
    """OpenBLAS from the ngsolve-openblas wheel, found without importing it (it prints)."""
    for entry in sys.path:
        for library in Path(entry, "ngsolve_openblas").glob("libopenblas*.so*"):
            if _dlopen(str(library)):
                return f"OpenBLAS ({library.name})"
    return ""


def _load_system_blas() -> str:
    import ctypes.util  # brings in `subprocess`, 0.5 MB

    name = ctypes.util.find_library("openblas")
    return f"OpenBLAS ({name})" if name and _dlopen(name) else ""


def _dlopen(path: str) -> bool:
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False  # `prepare` reports the slow BLAS that is left
    return True


def arithmetic() -> dict[str, str]:
    """Facts that decide the last bits of results besides bundle and options, by name."""
    libraries = ctypes.CDLL(None)
    blas = f"{_prepared[0] if _prepared else 'unknown'}, {platform.machine()}"
    if sys.platform == "darwin":
        blas = f"{blas}, macOS {platform.mac_ver()[0]}"
    if hasattr(libraries, "openblas_get_config"):  # its version and the kernel that it has chosen
        libraries.openblas_get_config.restype = ctypes.c_char_p
        blas = f"{libraries.openblas_get_config().decode()}, {platform.machine()}"
    facts = {"MLX's version": mlx_version(), "the BLAS": blas}
    facts["the number of BLAS threads"] = str(blas_threads())
    return facts | ({"the GPU": gpu} if (gpu := gpu_name()) else {})


def cores() -> int:
    """How many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def this_machine(device: str, arithmetic: str, compute_dtype: str = "float32") -> Machine:
    """This machine and the current process. Call it after all imports.

    `device` is what graphs were traced for; `arithmetic` is "packed", "unpacked" or "auto": packed
    on a GPU, which multiplies quantized matrices as they are, unpacked on a CPU. `compute_dtype` is
    "float32", "bfloat16" or "auto": bfloat16 where it is measurably faster.

    Raises:
        UsageError: products in bfloat16 are not available.
    """
    packed = arithmetic == "packed" or (arithmetic == "auto" and device == "gpu")
    allocator: Literal["glibc", "mlx", "metal"] = "mlx"
    later = 0
    if device == "gpu":
        later = _load_gpu()
        allocator = "metal" if sys.platform == "darwin" else "mlx"
    elif sys.platform == "linux":
        allocator = "glibc"
    dtype = choose(compute_dtype, device, packed)
    gc.collect()
    trim_heap()
    return Machine(
        device="gpu" if device == "gpu" else "cpu",
        arithmetic="packed" if packed else "unpacked",
        allocator=allocator,
        process_bytes=round_up(read_footprint().footprint_bytes) + later,
        blas=Blas() if sys.platform == "darwin" else Blas(blas_threads(), PANEL_BYTES, ROW_BYTES),
        limit_bytes=memory_limit_bytes(),
        compute_dtype=dtype.name,
        compute_reason=dtype.reason,
        llvm=device == "cpu" and not packed and not machine_code.lacking(),
    )


def _load_gpu() -> int:
    """Have MLX load the GPU's library, and the kernels of one operation of each kind.

    They come with the first evaluation, and stay: a process that is read before is too small.
    Returns the bytes that are loaded later all the same.
    """
    import mlx.core as mx

    if not mx.is_available(mx.gpu):
        return 0  # a plan is made here for a machine that has one
    with mx.stream(mx.gpu):
        x = mx.ones((128, 128))
        words, scales, biases = mx.quantize(x)
        product = mx.quantized_matmul(x @ x, words, scales, biases)
        x[8:16] = mx.fast.rms_norm(product + 1, mx.ones(128), 1e-6)[:8]
        mx.eval(x.sum(axis=-1), mx.exp(x))
    del x, words, scales, biases, product
    mx.clear_cache()
    if not mx.cuda.is_available():
        return 0
    footprint.count_besides(_held_by_mlx)  # in a memory that is the card's own
    return CUDA_BYTES


def _held_by_mlx() -> int:
    import mlx.core as mx

    return mx.get_active_memory() + mx.get_cache_memory()


def round_up(process_bytes: int) -> int:
    """A footprint rounded up, because the footprints of equal processes differ a little."""
    return -(-(process_bytes + READING_NOISE_BYTES) // ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES


def gpu_name() -> str:
    """The name of MLX's GPU; empty where it has none."""
    import mlx.core as mx

    return str(mx.device_info(mx.gpu)["device_name"]) if mx.is_available(mx.gpu) else ""


def automatic_device() -> str:
    """The device that "auto" means: "gpu" where MLX has one, else "cpu".

    A virtual Mac's GPU is not taken, since its driver lacks much of what MLX's kernels need.
    """
    name = gpu_name()
    return "gpu" if name and "paravirtual" not in name.lower() else "cpu"


def mlx_version() -> str:
    """The version of the MLX that is loaded; `importlib.metadata` would take 1.5 MB to say it."""
    import mlx.core as mx

    return str(vars(mx)["__version__"])


def use_device(device: str) -> None:
    """Make the device that graphs were traced for MLX's default.

    Raises:
        UsageError: there is no such device here.
    """
    import mlx.core as mx

    if device == "gpu" and not mx.is_available(mx.gpu):
        raise UsageError("the graphs were traced for a GPU, and MLX finds none here")
    mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)


def limit_memory(device: str, live_bytes: int, cache_bytes: int) -> None:
    """Limit MLX's cache to `cache_bytes`; `live_bytes` are what a plan has in use beside it.

    On a CPU only `bounded_run_ahead` limits the run-ahead. A GPU's has no limit: it would slow down
    evaluations, and would not bound what a command buffer keeps.
    """
    import mlx.core as mx

    mx.set_cache_limit(cache_bytes)
    _planned[0] = live_bytes + cache_bytes
    if device == "cpu":
        mx.set_memory_limit(NO_LIMIT)


@contextmanager
def bounded_run_ahead(more_bytes: int, within_plan: bool = False) -> Iterator[None]:
    """Let MLX allocate until it holds `more_bytes` more than now, or what it always may.

    With `within_plan` it may allocate until it holds what a plan has in use at its peak: of small
    arrays, which leave no large holes in the heap.

    MLX allocates for up to ten operations before the first of them has run, unless its memory limit
    is reached. On a CPU such a limit may not hold all the time, since MLX waits by spinning where
    it is reached while one operation runs, which cost up to a third of the processor's time.
    On a Mac nothing is bounded: a limit there would also have MLX empty its cache.
    """
    if sys.platform == "darwin":
        yield
        return
    import mlx.core as mx

    ahead = max(more_bytes, int(AHEAD * _planned[0]), LEAST_AHEAD_BYTES)
    bound = max(mx.get_active_memory() + ahead, _planned[0] if within_plan else 0)
    before = mx.set_memory_limit(bound)
    try:
        if before < bound:
            mx.set_memory_limit(before)
        yield
    finally:
        mx.set_memory_limit(before)


def describe() -> dict[str, Any]:
    """The machine and the versions of this process, for summaries and reports."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "mlx": mlx_version(),
    }
