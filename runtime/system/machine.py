"""The machine that a plan is made for, as a value: a plan for a Mac can be made on Linux.

`runtime.system.backend.this_machine` reads the machine and the process it runs in; a file that
`ondevice bench machine` has written describes another one, or this one as it was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ondevice.errors import UsageError

Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Blas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The library of matrix products on a CPU, and what it packs factors into.

    `panel_bytes` for each thread, and where several share a product, `row_bytes` for each row of
    the larger factor. OpenBLAS 0.3 takes a panel of 1.1 MB and 320 columns of float32.
    """

    threads: Annotated[int, msgspec.Meta(ge=1)] = 1
    panel_bytes: Bytes = 0
    row_bytes: Bytes = 0


class Heap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much more than what is alive the C library's heap holds; the rest is arithmetic.

    flat_bytes: whatever is alive. share: of what is alive on it; share_beside_mapped: the same
    where values too long for it are mapped. share_of_logits: of a chunk of logits.
    share_of_kept, share_of_materialized: of activations that are kept for the backward pass, and of
    weights that stay dequantized; flat_beside_materialized_bytes: where there are any of these. The
    defaults were fitted by `ondevice bench machine` on Linux
    x86-64 with glibc 2.36.
    """

    flat_bytes: int = 1_040_000
    share: float = 0.087
    share_beside_mapped: float = 0.03
    share_of_logits: float = 0.40
    share_of_kept: float = 0.02
    share_of_materialized: float = 0.03
    flat_beside_materialized_bytes: int = 2_000_000


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan has to know of a machine, and of the process that will train on it.

    process_bytes: footprint of the process after its imports, before it opens a bundle's graphs.
    allocator: what keeps freed buffers: "glibc", its heap, or "mlx", its own cache (every GPU).
    """

    device: Literal["cpu", "gpu"]
    arithmetic: Literal["packed", "unpacked"]
    allocator: Literal["glibc", "mlx"]
    process_bytes: Bytes
    blas: Blas = Blas()
    heap: Heap = Heap()

    @property
    def packed(self) -> bool:
        """Whether products take the quantized words as they are."""
        return self.arithmetic == "packed"


class _Report(msgspec.Struct):
    """What is read of the JSON that `ondevice bench machine` writes."""

    measured_machine: Machine


def read_machine(path: Path) -> Machine:
    """The machine in a JSON file that `ondevice bench machine` has written.

    Raises:
        UsageError: it cannot be read, or is not one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Report).measured_machine
    except OSError as problem:
        raise UsageError(f"--machine {path} cannot be read: {problem.strerror}") from None
    except msgspec.DecodeError as problem:
        raise UsageError(f"--machine {path} describes no machine: {problem}") from None
