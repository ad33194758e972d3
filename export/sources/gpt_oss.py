"""gpt-oss's experts as transformers stores them, and the matrices that a bundle has of them.

A layer has the rows of gate and of up in turn in one tensor, and those of down in another. In
floats these are transposed: (E, C, 2 W) and (E, W, C). In MXFP4 (the Open Compute Project's
microscaling formats, 1.0), as OpenAI published them, they are blocks (E, 2 W, C / 32, 16) of two
values in a byte, and scales (E, 2 W, C / 32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from export.sources.safetensors_files import MXFP4, AnyTensor, JoinedTensor, StoredTensor
from runtime.adapters.origins import Origin

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # of four bits
_SCALE_OF_ONE = 127  # scales are powers of 2
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class _OfExpert:
    """Of the rows of an expert's tensor every so many, from `first` on; with `scales` of MXFP4."""

    tensor: StoredTensor
    scales: StoredTensor | None
    number: int
    first: int
    every: int

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtype(self) -> str:
        return self.tensor.dtype if self.scales is None else MXFP4

    @property
    def shape(self) -> tuple[int, int]:
        _, rows, *columns = self.tensor.shape
        if self.scales is None:
            (rows,), columns = columns, [rows]
        return rows // self.every, columns[0] * (1 if self.scales is None else 2 * columns[1])

    def rows(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows start:stop of these, as a fresh array."""
        taken = slice(start * self.every, stop * self.every)
        if self.scales is None:
            rows = self.tensor.inside(self.number, slice(None), taken).astype(np.float32).T
        else:
            exponents = self.scales.inside(self.number, taken).astype(np.int32) - _SCALE_OF_ONE
            bytes_ = self.tensor.inside(self.number, taken)  # (rows, C / 32, 16)
            codes = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:2], -1)
            rows = np.ldexp(_VALUES[codes], exponents[..., None]).reshape(len(bytes_), -1)
        return np.ascontiguousarray(rows[self.first :: self.every])


def with_experts_apart(
    stored: Mapping[str, StoredTensor],
) -> tuple[dict[str, AnyTensor], dict[str, list[Origin]]]:
    """A checkpoint's tensors, where those of experts with biases are as mlx-lm names them.

    And where transformers has these in floats.
    """
    others, made = dict(stored), dict[str, AnyTensor]()
    origins: dict[str, list[Origin]] = {}
    for base in [name.removesuffix("gate_up_proj_bias") for name in stored]:
        if not _is_whole(stored, base):
            continue
        for joined, parts in _PARTS.items():
            biases = others.pop(f"{base}{joined}_bias")
            scales = others.pop(f"{base}{joined}_scales", None)
            whole = others.pop(f"{base}{joined}{'' if scales is None else '_blocks'}")
            count, width, every = whole.shape[0], biases.shape[-1], len(parts)
            for at, part in enumerate(parts):
                made[f"{base}{part}.bias"] = biases.across(at, width // every, every)
                made[f"{base}{part}.weight"] = JoinedTensor(
                    tuple(_OfExpert(whole, scales, number, at, every) for number in range(count))
                )
                columns, rows = (at, width // every, width), width // every
                origins[f"{base}{part}.bias"] = [
                    Origin(f"{base}{joined}_bias", 0, count, count, columns=columns, every=every)
                ]
                origins[f"{base}{part}.weight"] = [
                    Origin(f"{base}{joined}", at, rows, width, True, every=every, stack=count)
                ]
    return {**others, **made}, origins


def _is_whole(stored: Mapping[str, StoredTensor], base: str) -> bool:
    """Whether a layer has all tensors of its experts; else the missing ones are named later."""
    weights = ("_blocks", "_scales") if f"{base}down_proj_scales" in stored else ("",)
    axes = {"_bias": 2, "": 3, "_scales": 3, "_blocks": 4}
    return all(
        f"{base}{part}{kind}" in stored and len(stored[f"{base}{part}{kind}"].shape) == axes[kind]
        for part in _PARTS
        for kind in ("_bias", *weights)
    )
