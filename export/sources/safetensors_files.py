"""The safetensors files and JSON files of a checkpoint folder.

Weights are in a single file, or in shards that an index or their names list. Tensors are read by
rows as NumPy arrays. The safetensors library maps a file and checks its header: the tensors fill
the file without gap or overlap, and each has the bytes that its shape and type need.
Invariant: every file that is opened lies directly in the folder, and none is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import ml_dtypes  # noqa: F401  (imported, it gives NumPy the bfloat16 that safetensors asks for)
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.core.files import read_small
from runtime.core.lookalikes import FETCH, LFS_POINTER

_WHOLE = "model.safetensors"  # of weights in a single file
INDEX = "model.safetensors.index.json"
_MOST_JSON_BYTES = 64 << 20  # far above any index of tensors
MXFP4 = "MXFP4"  # of blocks and scales, which are read as floats
FLOAT_TYPES = ("F32", "F16", "BF16", MXFP4)  # the first are safetensors' names
_READ_AS = {"F32": np.float32, "F16": np.float16, "BF16": np.float32, "U32": np.uint32}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its name there, safetensors' name of its type, its shape (of a number 1).

    Or some of its rows, from `first` on, and of these the columns from `column` on, each or `every`
    second; or all of it, transposed; and what mlx-lm adds to its values. With `inner`, the file has
    matrices of so many rows each, one below the other.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    _file: Any
    first: int = 0
    is_transposed: bool = False
    shift: float = 0.0  # is added to all values
    inner: int = 0
    column: int = 0
    every: int = 1

    def transposed(self) -> StoredTensor:
        """The whole tensor, transposed."""
        return replace(self, shape=self.shape[::-1], is_transposed=True)

    def flat(self) -> StoredTensor:
        """A tensor (N, R, C) as the matrix (N * R, C), others as they are."""
        if len(self.shape) != 3:
            return self
        count, inner, columns = self.shape
        return replace(self, shape=(count * inner, columns), inner=inner)

    def part(self, first: int, rows: int) -> StoredTensor:
        """So many rows of it, from `first` on."""
        return replace(self, shape=(rows, *self.shape[1:]), first=self.first + first)

    def across(self, column: int, columns: int, every: int = 1) -> StoredTensor:
        """So many columns of a matrix, from `column` on, one in `every` so many."""
        shape = self.shape[0], columns
        return replace(self, shape=shape, column=self.column + column, every=every)

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows start:stop of a tensor of F32, F16, BF16 or U32, as a fresh array.

        They have the file's type, except that BF16 becomes float32.
        """
        read_as = _READ_AS[self.dtype]
        if start == stop:  # the library refuses an empty slice
            return np.empty((0, *self.shape[1:]), read_as)
        view, top, end = self._file.get_slice(self.name), self.first + start, self.first + stop
        rows: npt.NDArray[Any]
        if self.is_transposed:
            rows = np.ascontiguousarray(view[:, start:stop].T)
        elif self.inner:
            rows = self._rows_of_stacked(view, top, end)
        elif len(self.shape) == 2:
            last = self.column + (self.shape[1] - 1) * self.every
            rows = np.ascontiguousarray(view[top:end, self.column : last + 1][:, :: self.every])
        elif view.get_shape():
            rows = view[top:end]
        else:  # a number is a vector of one
            rows = self._file.get_tensor(self.name).reshape(1)
        rows = rows.astype(read_as, copy=False)
        return rows.astype(np.float32) + np.float32(self.shift) if self.shift else rows

    def inside(self, number: int, *where: slice) -> npt.NDArray[Any]:
        """A part of one of the arrays that a tensor is a stack of, as the file has it."""
        part: npt.NDArray[Any] = self._file.get_slice(self.name)[
            (slice(number, number + 1), *where)
        ][0]
        return part

    def _rows_of_stacked(self, view: Any, start: int, stop: int) -> npt.NDArray[Any]:
        parts = []
        for number in range(start // self.inner, -(-stop // self.inner)):
            top = number * self.inner
            within = slice(max(start - top, 0), min(stop - top, self.inner))
            parts.append(view[number : number + 1, within][0])
        return np.concatenate(parts)


class Readable(Protocol):
    """A tensor, or what is made of one, that is read by rows: see `StoredTensor`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def rows(self, start: int, stop: int) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class JoinedTensor:
    """Matrices of files, or parts of such, one below the other."""

    parts: tuple[Readable, ...]

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def dtype(self) -> str:
        """Their common type; each one's where there is none."""
        return "/".join(sorted({part.dtype for part in self.parts}))

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    def flat(self) -> JoinedTensor:
        """The same: it is a matrix."""
        return self

    def rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Rows start:stop, as a fresh array."""
        pieces, top = [], 0
        for part in self.parts:
            first, last = max(start - top, 0), min(stop - top, part.shape[0])
            if first < last:
                pieces.append(part.rows(first, last))
            top += part.shape[0]
        return np.concatenate(pieces) if pieces else self.parts[0].rows(0, 0)


AnyTensor = StoredTensor | JoinedTensor


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
            if _is_pointer(path):
                raise BundleError(f"{path}: it is {FETCH}") from None
            reason = str(problem).removeprefix("Error while deserializing header: ")
            raise BundleError(
                f"{path}: truncated or damaged, {self.bytes} bytes that are not a whole "
                f"safetensors file ({reason}); download it again"
            ) from None
        self.tensors = {
            name: StoredTensor(name, view.get_dtype(), tuple(view.get_shape()) or (1,), file)
            for name, view in slices.items()
        }


def open_shards(folder: Path) -> tuple[list[SafetensorsFile], list[str]]:
    """Open the weight files, and check that each holds the tensors that the index puts there.

    Beside them are warnings: where a single file holds all tensors, others are left aside.
    """
    weight_map = _weight_map(folder / INDEX)
    names = sorted({*weight_map.values()}) or _names_without_index(folder)
    if not names:
        raise BundleError(f"{folder}: no model*.safetensors; {_without_weights(folder)}")
    if (whole := _read_alone(folder, weight_map, names)) is not None:
        others = [name for name in names if name != _WHOLE and (folder / name).exists()]
        aside = ", ".join(others or [INDEX])
        return [whole], [f"{folder}: {_WHOLE} is read alone, as in transformers, without {aside}"]
    files: dict[str, SafetensorsFile] = {}
    for name in names:
        if Path(name).name != name or name in ("", ".", ".."):
            raise BundleError(
                f"{folder / INDEX}: {name!r} is not a plain file name; weights must lie in the "
                "folder itself"
            )
        if not (folder / name).is_file():
            raise BundleError(
                f"{folder}: {name} is missing (one of {len(names)} weight files); download it again"
            )
        files[name] = SafetensorsFile(folder / name)
    held: dict[str, str] = {}
    for name, file in files.items():
        for tensor in file.tensors:
            if (other := held.setdefault(tensor, name)) != name:
                raise BundleError(
                    f"{folder}: {tensor} is in {other} and in {name}; remove the file that is not "
                    "the model's, or download it again"
                )
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise BundleError(
                f"{folder}: the index puts {tensor} in {name}, which does not hold it; download "
                "both again"
            )
    return list(files.values()), []


def _read_alone(
    folder: Path, weight_map: dict[str, str], names: list[str]
) -> SafetensorsFile | None:
    """The single file where other files beside it hold none but its tensors; else None.

    Raises BundleError where an index names only others, and they hold more.
    """
    others = [name for name in names if name != _WHOLE]
    if not others or not (folder / _WHOLE).is_file():
        return None
    whole = SafetensorsFile(folder / _WHOLE)
    held: Iterable[str] = weight_map or (
        tensor
        for name in others
        if (folder / name).is_file()
        for tensor in SafetensorsFile(folder / name).tensors
    )
    more = [tensor for tensor in held if tensor not in whole.tensors]
    if more and weight_map and _WHOLE not in names:
        raise BundleError(
            f"{folder}: {_WHOLE}, which transformers reads alone, lacks {len(more)} of the "
            f"{len(weight_map)} tensors of {INDEX}, such as {more[0]}; remove {_WHOLE} or {INDEX}, "
            "whichever is not the model's"
        )
    return None if more else whole


def _without_weights(folder: Path) -> str:
    """The way out where a folder has no weight files of transformers' names."""
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return f"{others[0]} is of another program; get the files for transformers"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return "pickled weights are not read: transformers' save_pretrained converts them"
    return "the download may be incomplete"


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it; empty without an index."""
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BundleError(f"{index}: has no 'weight_map' from tensors to files; download it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise BundleError(f"{index}: {tensor} is in {name!r:.40}, no file; download it again")
    return weight_map


def _names_without_index(folder: Path) -> list[str]:
    """The names of the weight files, with those of shards that are missing.

    The name of a shard says how many there are.
    """
    names = {path.name for path in folder.glob("model*.safetensors")}
    for name in list(names):
        if match := re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", name):
            stem, total = match[1], int(match[2])
            names |= {f"{stem}-{i:05}-of-{total:05}.safetensors" for i in range(1, total + 1)}
    return sorted(names)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises BundleError if it is missing, holds no object, or has more than 64 MiB.
    """
    try:
        value = from_json(read_small(path, _MOST_JSON_BYTES, "a description of a checkpoint"))
    except FileNotFoundError:
        raise BundleError(f"{path}: missing; a checkpoint folder needs it") from None
    except OSError as e:
        raise BundleError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise BundleError(f"{path}: not JSON: {e}; download it again") from e
    if not isinstance(value, dict):
        raise BundleError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value
