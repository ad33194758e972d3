"""The type of products with frozen weights: as asked, or bfloat16 where it is faster here.

On a GPU it is the type of hidden values too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runtime.core.errors import UsageError
from runtime.machine import machine_code
from runtime.machine.llvm_code import Code, Pointer, Variable, dot_of_pairs, fields, fma
from runtime.machine.processor import cpu_flags

OPTION = "--compute-dtype bfloat16"
FASTER = 1.15  # times the rate of float32, from which on `auto` takes bfloat16
REPEATS = 9
LANES, SUMS = 16, 24  # of what is measured on a CPU: AVX-512, and sums as in a product
TIMES = 20_000  # that each sum grows, some 0.1 ms
TOKENS, COLUMNS = 256, 896  # of a product on a GPU
GPU_ROWS, TOGETHER = 4864, 4  # the rest, and how many are measured at once


@dataclass(frozen=True)
class ComputeDtype:
    """A type, and why it is taken."""

    name: Literal["float32", "bfloat16"]
    reason: str


def lacking() -> str:
    """Why this processor and its compiled code multiply no bfloat16; empty if they do."""
    if reason := machine_code.lacking():
        return f"products in bfloat16 are compiled, and {reason}"
    flags = cpu_flags()
    if "avx512f" in flags and "avx512_bf16" in flags:
        return ""
    return "this processor has no products of bfloat16 (AVX512-BF16)"


def choose(asked: str, device: str, packed: bool, here: bool = True) -> ComputeDtype:
    """The type for "float32", "bfloat16" or "auto", which takes bfloat16 where it is faster.

    If it is not for `here`, as for another machine, products in bfloat16 are taken to be there.

    Raises:
        UsageError: bfloat16 was asked for, and is not available.
    """
    if asked == "float32":
        return ComputeDtype("float32", "as is usual")
    reason = ""
    if device == "cpu":
        reason = lacking() if here else ""
        if packed:
            reason = "it multiplies unpacked weights; leave out --arithmetic packed"
    if reason and asked == "bfloat16":
        raise UsageError(f"{OPTION}: {reason}, or give float32")
    if reason:
        return ComputeDtype("float32", f"bfloat16: {reason}")
    if asked == "bfloat16" or not here:
        return ComputeDtype("bfloat16", "as asked")
    rates = measure_gpu() if device == "gpu" else measure()
    text = f"{rates.bfloat16:.0f} GFLOP/s in bfloat16, {rates.float32:.0f} in float32"
    text += "" if device == "gpu" else ", on each core"
    return ComputeDtype("bfloat16" if rates.faster else "float32", text)


@dataclass(frozen=True)
class Rates:
    """GFLOP/s of products in both types, the best of some repeats."""

    float32: float
    bfloat16: float

    @property
    def faster(self) -> bool:
        """Whether bfloat16 is faster beyond what measuring may be wrong by."""
        return self.bfloat16 >= FASTER * self.float32


def measure() -> Rates:
    """The rates of a core here and now, in some milliseconds: of factors in its registers."""
    rates = []
    for inner in (1, 2):
        work = machine_code.function(text_of(inner), 2)
        sums = np.zeros(LANES, np.float32)
        job = np.array([TIMES, sums.ctypes.data], np.int64)
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            work(job.ctypes.data, job.ctypes.data)
            seconds.append(time.perf_counter() - began)
        rates.append(2e-9 * TIMES * SUMS * LANES * inner / min(seconds))
    return Rates(*rates)


def text_of(inner: int) -> str:
    """Sums that grow by a product of float32 in each lane, or by the products of two bfloat16."""
    return Code(LANES).text(_grow, inner=inner)


def _grow(code: Code, job: Pointer, own: Pointer, *, inner: int) -> None:
    """A job: how many times, and where the result lies."""
    a = fields(job, ("times", "y"), ("y",))
    multiply, number = (fma, "float") if inner == 1 else (dot_of_pairs, "i32")
    factor = a.y.view(number).load()
    # they begin with different values, or LLVM would compute the same sum once
    sums = [Variable(code.value(float(at), "float", LANES)) for at in range(SUMS)]
    with code.loop(0, a.times, 1, sums):
        for total in sums:
            total.now = multiply(factor, factor, total.now)
    whole = sums[0].now
    for total in sums[1:]:
        whole = whole + total.now
    a.y.store(whole)


def measure_gpu() -> Rates:
    """The rates of a GPU's products with packed weights, forward and backward, here and now."""
    import mlx.core as mx

    rates = []
    with mx.stream(mx.gpu):
        packed, *others = mx.quantize(mx.ones((GPU_ROWS, COLUMNS)), group_size=64, bits=4)
        for dtype in (mx.float32, mx.bfloat16):
            x, y = (mx.ones((TOKENS, width), dtype) for width in (COLUMNS, GPU_ROWS))
            scales, biases = (values.astype(dtype) for values in others)
            mx.eval(x, y, packed, scales, biases)
            seconds = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                products = [
                    mx.quantized_matmul(given, packed, scales, biases, transpose=given is x)
                    for given in (x, y) * TOGETHER
                ]
                mx.eval(products)  # together, since a GPU is waited for
                seconds.append(time.perf_counter() - began)
            rates.append(4e-9 * TOGETHER * TOKENS * COLUMNS * GPU_ROWS / min(seconds))
    mx.clear_cache()
    return Rates(*rates)
