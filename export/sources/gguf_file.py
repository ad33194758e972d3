"""One memory-mapped GGUF file: its metadata as Python values, its tensors by rows.

The gguf library dequantizes, but does not read the header: its reader makes an array object for
each token of the vocabulary. For Gemma 3's 262 thousand tokens it took 27 s and 715 MB, where this
reader took 0.4 s and 28 MB.
Invariant: every tensor in `tensors` lies inside its file and overlaps no other.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFType, GGUFValueType, Keys
from gguf.quants import dequantize

from export.stored import F32
from runtime.core.errors import BundleError

_MAGIC = b"GGUF"
_PART = "{name}-{number:05}-of-{count:05}.gguf"  # as llama.cpp names them
_TYPE_BYTES = 4096  # at a file's start; every writer known here has put the type there
_STRING, _ARRAY = 8, 9
_SCALARS = {  # GGUF value type -> struct code
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file; its shape has the rows first."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    row_bytes: int
    start_byte: int


class GGUFFile:
    """A mapped GGUF file (little-endian, version 2 or 3), or several that are parts of one.

    metadata: values by key; numeric arrays are NumPy arrays, string arrays lists.
    The first of several has the metadata of all, and `tensors` are those of all.
    Raises BundleError on a truncated, inconsistent, missing or unreadable one.
    """

    def __init__(self, path: Path, is_first: bool = True) -> None:
        self.name = path.name
        self.bytes = path.stat().st_size
        self._path = path
        self._at = 0
        if self.bytes < 24:
            raise BundleError(f"{path}: truncated, {self.bytes} bytes, not even a GGUF header")
        with path.open("rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, tensor_count, key_count = self._unpack("<4sIQQ")
        if magic != _MAGIC or version not in (2, 3):
            raise BundleError(
                f"{path}: not a little-endian GGUF file of version 2 or 3 "
                f"(magic {magic!r}, version {version})"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                raise BundleError(f"{path}: metadata key {key!r} occurs twice")
            self.metadata[key] = self._value(key, self._unpack("<I")[0])
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise BundleError(f"{path}: general.alignment {alignment!r} is not a power of two")
        data_start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_, offset in infos:
            if name in self.tensors:
                raise BundleError(f"{path}: tensor {name!r} occurs twice")
            self.tensors[name] = self._tensor(name, shape, type_, data_start + offset)
        self._check_overlaps()
        self._others: dict[str, GGUFFile] = {}  # by the names of their tensors
        if is_first:
            self._join(self.metadata.get("split.count", 1))

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each file, by its name."""
        return {part.name: part.bytes for part in (self, *self._others.values())}

    def _join(self, count: Any) -> None:
        """Take in the tensors of the other parts of a model, which lie beside this one."""
        if not isinstance(count, int):
            raise BundleError(f"{self._path}: split.count is {count!r:.40}, no number of parts")
        if count in (0, 1):
            return
        name = self.name.removesuffix(_PART.format(name="", number=1, count=count))
        if name == self.name:
            raise BundleError(
                f"{self._path}: one of {count} parts; give the first one, with the others beside "
                f"it: {_PART.format(name='NAME', number=1, count=count)}"
            )
        for number in range(2, count + 1):
            path = self._path.with_name(_PART.format(name=name, number=number, count=count))
            if not path.is_file():
                raise BundleError(f"{path} is missing, part {number} of {count}; download it too")
            part = GGUFFile(path, is_first=False)
            if part.metadata.get("split.no") != number - 1 or self.tensors.keys() & part.tensors:
                raise BundleError(f"{path} is not part {number} of {self.name}; download it again")
            self.tensors |= part.tensors
            self._others |= dict.fromkeys(part.tensors, part)
        if len(self.tensors) != self.metadata.get("split.tensors.count", len(self.tensors)):
            raise BundleError(
                f"{self._path}: {len(self.tensors)} tensors in {count} parts, it says "
                f"{self.metadata['split.tensors.count']}; download all parts again"
            )

    def check_readable(self, name: str) -> None:
        """Raise BundleError for a tensor of a type that the gguf library cannot dequantize."""
        kind = self.tensors[name].type
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise BundleError(
                f"{self._path}: tensors of type {kind.name} cannot be read, as {name} is; take a "
                "file of another type, such as Q8_0 or Q4_K_M"
            ) from None

    def rows(
        self,
        name: str,
        index: npt.NDArray[np.intp] | slice,
        columns: npt.NDArray[np.intp] | slice | None = None,
    ) -> F32:
        """Dequantized rows of a tensor, (n, in) or, for a vector, (n,); a fresh array.

        With `columns`, those alone.
        """
        self.check_readable(name)
        tensor, is_part = self.tensors[name], isinstance(columns, slice)
        stored = self.stored_rows(name, index, columns if isinstance(columns, slice) else None)
        shape = (-1,) if is_part else tensor.shape[1:]
        if stored.shape[0] == 0:
            return np.empty((0, *tensor.shape[1:]), np.float32)
        numbers: F32 = np.asarray(dequantize(stored, tensor.type), np.float32)
        numbers = numbers.reshape(stored.shape[0], *shape)
        return numbers if is_part or columns is None else numbers[:, columns]

    def stored_rows(
        self, name: str, index: npt.NDArray[np.intp] | slice, columns: slice | None = None
    ) -> npt.NDArray[np.uint8]:
        """Rows of a tensor as the file has them, (n, bytes of a row); a fresh array.

        With `columns`, the bytes of those alone. Raises BundleError if they are not whole blocks.
        """
        tensor = self.tensors[name]
        count = tensor.shape[0]
        table = np.frombuffer(
            self._others.get(name, self)._map,
            np.uint8,
            count=count * tensor.row_bytes,
            offset=tensor.start_byte,
        ).reshape(count, tensor.row_bytes)
        if columns is not None:
            values, octets = GGML_QUANT_SIZES[tensor.type]
            if columns.start % values or columns.stop % values:
                raise BundleError(
                    f"{self._path}: {name} is {tensor.type.name}, in whose blocks of {values} "
                    f"columns {columns.start} to {columns.stop} of a layer do not begin and end; "
                    "take a file of another type, such as Q8_0"
                )
            table = table[:, columns.start // values * octets : columns.stop // values * octets]
        return np.array(table[index])  # contiguous and aligned, whatever the file does

    def _tensor(self, name: str, shape: tuple[int, ...], type_: int, start: int) -> GGUFTensor:
        where = f"{self._path}: {name}"
        try:
            kind = GGMLQuantizationType(type_)
        except ValueError:
            raise BundleError(f"{where} has the unknown ggml type {type_}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        width = prod(shape[1:])
        if width % block or shape[-1] % block or min(shape) < 1:
            raise BundleError(f"{where}: shape {shape} does not fill {kind.name} blocks of {block}")
        tensor = GGUFTensor(shape, kind, width // block * block_bytes, start)
        end = start + shape[0] * tensor.row_bytes
        if end > self.bytes:
            raise BundleError(
                f"{where} ends at byte {end} of a file of {self.bytes}: truncated; "
                "download it again"
            )
        return tensor

    def _check_overlaps(self) -> None:
        end, before = 0, ""
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].start_byte):
            if tensor.start_byte < end:
                raise BundleError(
                    f"{self._path}: {name} starts at byte {tensor.start_byte}, inside {before}, "
                    f"which ends at {end}: damaged; download it again"
                )
            end, before = tensor.start_byte + tensor.shape[0] * tensor.row_bytes, name

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (count,) = self._unpack("<I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise BundleError(
                f"{self._path}: {name} has {count} dimensions, 1 to {_MAX_DIMENSIONS} are possible"
            )
        dims = self._unpack(f"<{count}Q")  # fastest first
        type_, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), type_, offset

    def _value(self, key: str, type_: int) -> Any:
        if type_ == _STRING:
            return self._string()
        if type_ == _ARRAY:
            item, count = self._unpack("<IQ")
            if item == _STRING:
                return [self._string() for _ in range(count)]
            if item in _SCALARS:
                dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
                return np.frombuffer(self._take(count * dtype.itemsize), dtype)
            type_ = item
        if type_ not in _SCALARS:
            raise BundleError(f"{self._path}: {key} has the unknown type {type_} of metadata")
        return self._unpack("<" + _SCALARS[type_])[0]

    def _string(self) -> str:
        # tokens of byte-level vocabularies are stored as text, so only damage fails to decode
        try:
            return self._take(self._unpack("<Q")[0]).decode("utf-8")
        except UnicodeDecodeError as e:
            raise BundleError(f"{self._path}: text before byte {self._at} is not UTF-8") from e

    def _unpack(self, code: str) -> tuple[Any, ...]:
        return struct.unpack(code, self._take(struct.calcsize(code)))

    def _take(self, count: int) -> bytes:
        if count > self.bytes - self._at:
            raise BundleError(
                f"{self._path}: truncated, the header asks for {count} bytes at {self._at} in a "
                f"file of {self.bytes}; download it again"
            )
        self._at += count
        return self._map[self._at - count : self._at]


def is_model(path: Path) -> bool:
    """Whether a file is a GGUF file of a model."""
    return _has_type(path, GGUFType.MODEL)


def is_adapter(path: Path) -> bool:
    """Whether a file is a GGUF file of an adapter."""
    return _has_type(path, GGUFType.ADAPTER)


def _has_type(path: Path, kind: str) -> bool:
    """Whether a file begins as a GGUF file whose `general.type` is `kind`."""
    entry = b"".join(  # of the metadata: a key, the type of its value, and the text
        (
            str(Keys.General.TYPE).encode(),
            int(GGUFValueType.STRING).to_bytes(4, "little"),
            len(kind).to_bytes(8, "little"),
            kind.encode(),
        )
    )
    with path.open("rb") as file:
        start = file.read(_TYPE_BYTES)
    return start.startswith(_MAGIC) and entry in start
