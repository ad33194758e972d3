"""Matrices that MLX has already quantized: the layout of each, and checks of its parts.

Such a matrix is three tensors: "weight", words of integers, and "scales" and "biases" of each
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from export.sources.safetensors_files import FLOAT_TYPES, AnyTensor
from export.stored import QuantizedForm, words_of
from runtime.core.errors import BundleError

_PART_TYPES = {"weight": ("U32",), "scales": FLOAT_TYPES, "biases": FLOAT_TYPES}
_BITS = (2, 3, 4, 5, 6, 8)
_DEFAULTS = {"bits": 4, "group_size": 64}  # MLX's, of a matrix with settings of its own


@dataclass(frozen=True)
class Layout:
    """A matrix of MLX's affine integers of `bits` bits, and how a bundle stores the same values.

    A bundle has 4 or 8 bits for each integer; scales and biases remain as they are.
    """

    bits: int
    form: QuantizedForm


def _all_floats(tensors: Mapping[str, AnyTensor]) -> bool:
    """Whether these are plain weights, though a configuration may still speak of quantization."""
    return all(
        tensor.dtype in FLOAT_TYPES and name.endswith((".weight", ".bias", ".sinks", ".inv_freq"))
        for name, tensor in tensors.items()
    )


def find_layouts(
    raw: Mapping[str, Any], tensors: Mapping[str, AnyTensor], where: str
) -> dict[str, Layout]:
    """The layout of each quantized matrix, by the name of its weight.

    Args:
        raw: the configuration; its "quantization" holds the settings of all matrices and, by name,
            those of single ones.
        tensors: the language model's, by mlx-lm's names.
        where: the folder, for messages.

    Raises BundleError for other quantizations than MLX's affine one, and for parts that are missing
    or do not fit.
    """
    scales = [name for name in tensors if name.endswith(".scales")]
    settings, foreign = (
        _object(raw, key, where) for key in ("quantization", "quantization_config")
    )
    if settings is None and foreign is not None and not _all_floats(tensors):
        method = foreign.get("quant_method", foreign.get("mode", "unknown"))
        raise BundleError(
            f"{where}: quantized by {method!r}; supported are unquantized checkpoints and MLX's "
            "affine quantization; start from the model that was quantized"
        )
    if settings is None and scales:
        raise BundleError(
            f"{where}/config.json: without a 'quantization', though the weights hold {scales[0]}; "
            "download it again, or, if MLX has not quantized it, start from the unquantized model"
        )
    layouts: dict[str, Layout] = {}
    for name in scales:
        base = name.removesuffix(".scales")
        stored_base = tensors[name].name.removesuffix(".scales")
        of_all = settings or {}
        key = stored_base if stored_base in of_all else base
        own = None if of_all.get(key) is True else _object(of_all, key, where)  # true: as all
        of_matrix = of_all if own is None else _DEFAULTS | own
        bits, group_size = _integers(of_matrix, f"{where}: {base}")
        _check_parts(base, bits, group_size, tensors, where)
        halves = all(tensors[f"{base}.{part}"].dtype == "F16" for part in ("scales", "biases"))
        layouts[f"{base}.weight"] = Layout(
            bits,
            QuantizedForm(
                4 if bits <= 4 else 8, group_size, "affine", "float16" if halves else "float32"
            ),
        )
    return layouts


def matrix_shape(tensor: AnyTensor, bits: int) -> tuple[int, int]:
    """(out, in) of a matrix that is stored as (out, in * bits / 32) words."""
    out, words = tensor.shape
    return out, words * 32 // bits


def widened(words: npt.NDArray[np.uint32], bits: int, new_bits: int) -> npt.NDArray[np.uint32]:
    """Rows (R, in * bits / 32) of integers of `bits` bits, as integers of `new_bits` (4 or 8).

    A row is one sequence of bits, the lowest of each integer first: eight integers fill `bits`
    bytes.
    """
    if bits == new_bits:
        return words
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, bits)
    eights = np.zeros((*octets.shape[:2], 8), np.uint8)
    eights[..., :bits] = octets
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    codes = (eights.view("<u8") >> shifts).astype(np.uint8) & np.uint8(2**bits - 1)
    return words_of(codes.reshape(len(words), -1), new_bits)


def _object(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any] | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise BundleError(f"{where}/config.json: {key} must be an object, is {value!r:.60}")
    return value


def _integers(settings: Mapping[str, Any], where: str) -> tuple[int, int]:
    """The bits and the group size that `settings` tell."""
    mode = settings.get("mode", "affine")
    bits, group = settings.get("bits"), settings.get("group_size")
    if mode != "affine" or bits not in _BITS or group not in (32, 64, 128):
        raise BundleError(
            f"{where}: quantized with mode {mode!r:.40}, bits {bits!r:.40}, group_size "
            f"{group!r:.40}; supported are affine, {', '.join(map(str, _BITS))} bits, groups of "
            "32, 64 or 128; start from an unquantized checkpoint instead"
        )
    return int(bits), int(group)


def _check_parts(
    base: str, bits: int, group_size: int, tensors: Mapping[str, AnyTensor], where: str
) -> None:
    for part, types in _PART_TYPES.items():
        tensor = tensors.get(f"{base}.{part}")
        if tensor is None or tensor.dtype not in types or len(tensor.shape) != 2:
            raise BundleError(
                f"{where}: {base}.{part} is missing or no matrix of {' or '.join(types)}; "
                "download it again"
            )
    words = tensors[f"{base}.weight"]
    out, width = matrix_shape(words, bits)
    groups = (out, width // group_size)
    for part in ("scales", "biases"):
        shape = tensors[f"{base}.{part}"].shape
        if shape != groups or width % group_size or width * bits != words.shape[1] * 32:
            raise BundleError(
                f"{where}: {base}.{part} is {shape}, but {bits} bits in groups of {group_size} "
                f"imply {groups}: config.json is of other weights, or has lost the bits that a "
                "module has for itself; download both again"
            )
