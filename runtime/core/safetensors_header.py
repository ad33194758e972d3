"""The header of a safetensors file, for writers that stream the tensors after it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def safetensors_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The bytes that stand before the tensors' own, which follow in this order without gaps.

    Args:
        tensors: the type, F32, F16 or BF16, and the shape of each, by name.
        metadata: texts for readers; "format" names the library that wrote them.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
