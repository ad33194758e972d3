"""The machine that a plan is made for, as plain data: Linux can make a plan for a Mac.

`runtime.machine.backend.this_machine` describes this machine and the current process. A file that
`ondevice bench machine` wrote describes another machine, or adds measured heap values to this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from runtime.core.documents import from_json
from runtime.core.errors import UsageError
from runtime.core.files import read_file

Bytes = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0)]


class Blas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of the library that multiplies matrices on a CPU.

    It packs factors into `panel_bytes` for each thread and, with several threads, `row_bytes` for
    each row of the larger factor. In OpenBLAS 0.3 these are 1.1 MB, and 320 values of float32.
    """

    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    panel_bytes: Bytes = 0
    row_bytes: Bytes = 0


class Heap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much memory the C library's heap holds beyond what is in use.

    flat_bytes: a fixed part.
    share: a share of the bytes in use on the heap.
    share_of_backward: a further share of them if the method runs backward, whose values have more
        sizes and live longer.
    share_beside_mapped: replaces both if long values are mapped outside the heap.
    share_of_logits: a share of one chunk of logits, if the method runs backward.
    share_of_kept: a share of the activations that are kept for the backward pass.
    share_of_wider: a share of what the widest value takes more than hidden states, into whose holes
        it does not fit, up to two of these; twice if the method runs backward.

    Weights that stay dequantized add nothing, since they are allocated together before all else.

    The defaults were fitted on Linux x86-64 with glibc 2.36.
    """

    flat_bytes: Bytes = 830_000
    share: Share = 0.05
    share_of_backward: Share = 0.045
    share_beside_mapped: Share = 0.03
    share_of_logits: Share = 0.7
    share_of_kept: Share = 0.02
    share_of_wider: Share = 0.33


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts about a machine, and the process that will train on it, on which a plan depends.

    process_bytes: footprint of the process after its imports, before it opens a bundle's graphs.
    allocator: where freed buffers stay: in the heap ("glibc"), or in MLX's cache ("mlx"); "metal"
        is MLX's on a Mac's GPU, whose buffers are whole pages.
    compute_dtype: the type that products with frozen weights are computed in, and why.
    llvm: whether code that LLVM has compiled multiplies by quantized weights.
    limit_bytes: the most that the system lets the process take, its container's limit; None if
        there is none.
    """

    device: Literal["cpu", "gpu"]
    arithmetic: Literal["packed", "unpacked"]
    allocator: Literal["glibc", "mlx", "metal"]
    process_bytes: Bytes
    blas: Blas = Blas()
    heap: Heap = Heap()
    limit_bytes: Bytes | None = None
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_reason: str = ""
    llvm: bool = False

    @property
    def packed(self) -> bool:
        """Whether matrix products read the quantized words directly."""
        return self.arithmetic == "packed"


class _Report(msgspec.Struct):
    """The part of `ondevice bench machine`'s JSON that plans read."""

    measured_machine: Machine


def read_machine(path: Path) -> Machine:
    """The machine in a JSON file that `ondevice bench machine` has written.

    Raises:
        UsageError: the file cannot be read, or describes no machine.
    """
    try:
        return msgspec.convert(from_json(read_file(path)), _Report).measured_machine
    except OSError as problem:
        raise UsageError(f"--machine {path} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise UsageError(
            f"--machine {path} describes no machine: {problem}; if another version of ondevice "
            "wrote it, measure the machine again (ondevice bench machine)"
        ) from None
