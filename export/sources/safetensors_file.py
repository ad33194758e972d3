"""One safetensors file, whose tensors are read by rows as NumPy arrays.

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

from runtime.core.errors import BundleError

FLOAT_TYPES = ("F32", "F16", "BF16")  # safetensors' names
_READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": np.float32, "U32": np.uint32}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its name there, safetensors' name of its type, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    _file: Any

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows start:stop of a tensor of F32, F16, BF16 or U32, as a fresh array.

        They have the file's type, except that BF16 becomes float32.
        """
        read_as = _READ_AS[self.dtype]
        if start == stop:  # the library refuses an empty slice
            return np.empty((0, *self.shape[1:]), read_as)
        rows: npt.NDArray[Any] = self._file.get_slice(self.name)[start:stop]
        return rows.astype(read_as, copy=False)


class SafetensorsFile:
    """A mapped safetensors file; `tensors` are its tensors by name.

    Raises BundleError if the file is truncated or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.bytes = path.stat().st_size
        try:
            file = cast("Any", safe_open(path, framework="numpy"))
            slices = {name: file.get_slice(name) for name in sorted(file.keys())}
        except SafetensorError as problem:
            reason = str(problem).removeprefix("Error while deserializing header: ")
            raise BundleError(
                f"{path}: truncated or damaged, {self.bytes} bytes that are not a whole "
                f"safetensors file ({reason}); download it again"
            ) from None
        self.tensors = {
            name: StoredTensor(name, found.get_dtype(), tuple(found.get_shape()), file)
            for name, found in slices.items()
        }
