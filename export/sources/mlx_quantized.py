"""Matrices that MLX has already quantized: how each is packed, and checks of its parts.

Such a matrix is three tensors: "weight", packed integers, and "scales" and "biases" of each group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export.sources.safetensors_file import FLOAT_TYPES, StoredTensor
from export.sources.source import Prequantized
from ondevice.errors import BundleError

_PART_TYPES = {"weight": ("U32",), "scales": FLOAT_TYPES, "biases": FLOAT_TYPES}


def find_layouts(
    raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, Prequantized]:
    """The layout of each quantized matrix, by the name of its weight.

    Args:
        raw: the configuration; its "quantization" holds the settings of all matrices and, by name,
            those of single ones.
        tensors: the language model's, by mlx-lm's names.
        where: the folder, for messages.

    Raises BundleError for other quantizations than MLX's affine one in 4 or 8 bits, and for parts
    that are missing or do not fit.
    """
    scales = [name for name in tensors if name.endswith(".scales")]
    settings = raw.get("quantization")
    foreign = raw.get("quantization_config")
    if settings is None and isinstance(foreign, dict):
        method = foreign.get("quant_method", foreign.get("mode", "unknown"))
        raise BundleError(
            f"{where}: quantized by {method!r}; supported are unquantized checkpoints and MLX's "
            "affine quantization in 4 or 8 bits"
        )
    if settings is None and scales:
        raise BundleError(
            f"{where}/config.json: without a 'quantization', though the weights hold {scales[0]}; "
            "download it again"
        )
    found: dict[str, Prequantized] = {}
    for name in scales:
        base = name.removesuffix(".scales")
        stored_base = tensors[name].name.removesuffix(".scales")
        chosen = settings
        if isinstance(settings, dict):
            own = settings.get(stored_base, settings.get(base))
            chosen = {**settings, **own} if isinstance(own, dict) else settings
        layout = _layout(chosen, f"{where}: {base}")
        _check_parts(base, layout, tensors, where)
        found[f"{base}.weight"] = layout
    return found


def unpacked_shape(tensor: StoredTensor, layout: Prequantized) -> tuple[int, int]:
    """(out, in) of a matrix that is stored as (out, in * bits / 32) words."""
    out, words = tensor.shape
    return out, words * 32 // layout.bits


def _layout(settings: Any, where: str) -> Prequantized:
    if not isinstance(settings, dict):
        raise BundleError(f"{where}: 'quantization' must be an object, is {settings!r}")
    mode = settings.get("mode", "affine")
    bits, group = settings.get("bits"), settings.get("group_size")
    if mode != "affine" or bits not in (4, 8) or group not in (32, 64, 128):
        raise BundleError(
            f"{where}: quantized as {mode}, {bits} bits, groups of {group}; supported are affine, "
            "4 or 8 bits, groups of 32, 64 or 128; start from an unquantized checkpoint instead"
        )
    return Prequantized(int(bits), int(group))


def _check_parts(
    base: str, layout: Prequantized, tensors: Mapping[str, StoredTensor], where: str
) -> None:
    for part, types in _PART_TYPES.items():
        tensor = tensors.get(f"{base}.{part}")
        if tensor is None or tensor.dtype not in types or len(tensor.shape) != 2:
            raise BundleError(
                f"{where}: {base}.{part} is missing or no matrix of {' or '.join(types)}; "
                "download it again"
            )
    out, width = unpacked_shape(tensors[f"{base}.weight"], layout)
    groups = (out, width // layout.group_size)
    for part in ("scales", "biases"):
        shape = tensors[f"{base}.{part}"].shape
        if shape != groups or width % layout.group_size:
            raise BundleError(
                f"{where}: {base}.{part} is {shape}, but {layout.bits} bits in groups of "
                f"{layout.group_size} imply {groups}"
            )
