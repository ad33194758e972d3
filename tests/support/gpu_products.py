"""Products of bfloat16 with quantized weights as MLX's GPUs compute them, on its CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import pytest


def with_gpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, sum in float32: MLX's CPU rounds every sum to bfloat16."""
    if not mx.is_available(mx.gpu):
        monkeypatch.setattr(mx, "quantized_matmul", partial(_product, mx.quantized_matmul))


def _product(
    original: Any, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, **how: Any
) -> mx.array:
    if x.dtype == mx.float32:
        return original(x, w, scales, biases, **how)
    whole = mx.dequantize(w, scales, biases, how["group_size"], how["bits"])
    return x @ (whole.T if how["transpose"] else whole)
