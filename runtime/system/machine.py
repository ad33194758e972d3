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

    @property
    def packed(self) -> bool:
        """Whether products take the quantized words as they are."""
        return self.arithmetic == "packed"


def read_machine(path: Path) -> Machine:
    """The machine in a JSON file.

    Raises:
        UsageError: it cannot be read, or is not one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Machine)
    except OSError as problem:
        raise UsageError(f"--machine {path} cannot be read: {problem.strerror}") from None
    except msgspec.DecodeError as problem:
        raise UsageError(f"--machine {path} describes no machine: {problem}") from None
