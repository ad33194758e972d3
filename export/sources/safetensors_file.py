"""One safetensors file: what tensors it holds, and their rows as NumPy arrays.

The library maps the file and checks its header: the tensors fill the file without gap or overlap,
and each has the bytes that its shape and type need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ml_dtypes  # noqa: F401  (imported, it gives NumPy the bfloat16 that safetensors asks for)
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ondevice.errors import BundleError

FLOAT_TYPES = ("F32", "F16", "BF16")  # safetensors' names
_READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": np.float32, "U32": np.uint32}


@dataclass(frozen=True)
class Entry:
    """A tensor of the file: its type, by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """A mapped safetensors file; `entries` are its tensors by name.

    Raises BundleError where the file is truncated or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.bytes = path.stat().st_size
        try:
            self._mapped = cast("Any", safe_open(path, framework="numpy"))
            names = self._mapped.keys()
            slices = [self._mapped.get_slice(name) for name in names]
        except SafetensorError as problem:
            reason = str(problem).removeprefix("Error while deserializing header: ")
            raise BundleError(
                f"{path}: truncated or damaged, {self.bytes} bytes that are not a whole "
                f"safetensors file ({reason}); download it again"
            ) from None
        self.entries = {
            name: Entry(tensor.get_dtype(), tuple(tensor.get_shape()))
            for name, tensor in zip(names, slices, strict=True)
        }

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows start:stop of a tensor of F32, F16, BF16 or U32, as a fresh array.

        They have the file's type, but for BF16, which becomes float32.
        """
        entry = self.entries[name]
        read_as = _READ_AS[entry.dtype]
        if start == stop:  # the library refuses an empty slice
            return np.empty((0, *entry.shape[1:]), read_as)
        rows: npt.NDArray[Any] = self._mapped.get_slice(name)[start:stop]
        return rows.astype(read_as, copy=False)
