"""One safetensors file, mapped: its header checked against its size, its tensors sliced by rows.

Invariant: every tensor that `entries` lists lies inside the file with exactly the bytes that its
shape and type need.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from export.sources.source import Floats
from ondevice.errors import BundleError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
FLOAT_TYPES = ("F32", "F16", "BF16")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its safetensors type, its shape, and its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start_byte: int


class SafetensorsFile:
    """A mapped safetensors file. Raises BundleError on a truncated or inconsistent one."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.bytes = path.stat().st_size
        if self.bytes < 8:
            raise BundleError(f"{path}: truncated, {self.bytes} bytes, not even a header length")
        self._data: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        header_bytes = int(self._data[:8].view("<u8")[0])
        if header_bytes > _MAX_HEADER_BYTES:
            raise BundleError(f"{path}: not a safetensors file (header of {header_bytes} bytes)")
        if header_bytes > self.bytes - 8:
            raise BundleError(
                f"{path}: truncated, a header of {header_bytes} bytes in a file of {self.bytes}"
            )
        try:
            header = json.loads(self._data[8 : 8 + header_bytes].tobytes())
            header.pop("__metadata__", None)
            self.entries = {
                name: self._entry(f"{path}: {name}", fields, 8 + header_bytes)
                for name, fields in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise BundleError(f"{path}: the safetensors header cannot be read: {e}") from e

    def _entry(self, where: str, fields: dict[str, Any], base: int) -> Entry:
        dtype, shape = str(fields["dtype"]), tuple(int(d) for d in fields["shape"])
        start, stop = (int(v) for v in fields["data_offsets"])
        if dtype not in ITEM_BYTES:
            raise BundleError(f"{where} has the unknown type {dtype}")
        needed = prod(shape) * ITEM_BYTES[dtype]
        if min(shape, default=0) < 0 or start < 0 or stop - start != needed:
            raise BundleError(f"{where} needs {needed} bytes, its offsets give {stop - start}")
        if base + stop > self.bytes:
            raise BundleError(
                f"{where} ends at byte {base + stop} of a file of {self.bytes}: truncated; "
                "download it again"
            )
        return Entry(dtype, shape, base + start)

    def raw_rows(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of rows start:stop, as a copy."""
        entry = self.entries[name]
        row_bytes = prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype]
        first = entry.start_byte + start * row_bytes
        return np.array(self._data[first : first + (stop - start) * row_bytes])

    def float_rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows start:stop, (stop - start, ...): float16 and float32 as stored, bfloat16 widened."""
        entry = self.entries[name]
        raw = self.raw_rows(name, start, stop)
        shape = (stop - start, *entry.shape[1:])
        if entry.dtype == "BF16":
            wide = raw.view("<u2").astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(shape)
        return raw.view("<f4" if entry.dtype == "F32" else "<f2").reshape(shape)
