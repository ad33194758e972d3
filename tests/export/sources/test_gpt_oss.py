"""gpt-oss's experts as transformers stores them: MXFP4, and rows of gate and up in turn."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file
from support.bundles import Rng

from export.sources.gpt_oss import with_experts_apart
from export.sources.safetensors_files import SafetensorsFile

EXPERTS, WIDTH, COLUMNS = 3, 4, 64


def test_experts_are_read_from_blocks_and_from_transposed_floats(rng: Rng, tmp_path: Path) -> None:
    names = ("gate_up_proj", "down_proj")
    packed, floats, expected = {}, {}, {}
    for name, rows in zip(names, (2 * WIDTH, COLUMNS), strict=True):
        drawn = mx.array(rng.standard_normal((EXPERTS * rows, COLUMNS)).astype(np.float32))
        words, scales = mx.quantize(drawn, 32, 4, mode="mxfp4")
        values = mx.dequantize(words, scales, group_size=32, bits=4, mode="mxfp4")
        whole = np.array(values.astype(mx.float32)).reshape(EXPERTS, rows, COLUMNS)
        groups = (EXPERTS, rows, COLUMNS // 32)
        bias = rng.standard_normal((EXPERTS, rows)).astype(np.float32)
        packed[f"experts.{name}_blocks"] = np.array(words).view(np.uint8).reshape(*groups, 16)
        packed[f"experts.{name}_scales"] = np.array(scales).reshape(groups)
        floats[f"experts.{name}"] = np.ascontiguousarray(whole.swapaxes(1, 2))
        packed[f"experts.{name}_bias"] = floats[f"experts.{name}_bias"] = bias
        turns = [("gate_proj", 0), ("up_proj", 1)] if name == names[0] else [(name, 0)]
        for part, first in turns:
            every = len(turns)
            expected[f"experts.{part}.weight"] = whole[:, first::every].reshape(-1, COLUMNS)
            expected[f"experts.{part}.bias"] = bias[:, first::every]
    for number, tensors in enumerate((packed, floats)):
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path)
        found, origins = with_experts_apart(SafetensorsFile(path).tensors)
        assert found.keys() == origins.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].shape == values.shape
            assert np.array_equal(found[name].rows(0, len(values)), values)
            assert np.array_equal(found[name].rows(1, len(values) - 1), values[1:-1])
        for name, (origin,) in origins.items():  # in floats, whichever the file has
            first, rows, _ = origin.columns or (origin.first, origin.rows, 0)
            there = floats[origin.name][..., first :: origin.every][..., :rows]
            if origin.stack:
                assert origin.transposed
                assert (origin.stack, COLUMNS, origin.height) == floats[origin.name].shape
                there = there.swapaxes(1, 2).reshape(-1, COLUMNS)
            assert np.array_equal(there, expected[name]), name
