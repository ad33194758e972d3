"""The device that a bundle's graphs need: made the default, or refused with the way out."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest

from ondevice.errors import UsageError
from runtime.system.backend import use_device


def test_graphs_for_a_gpu_that_is_not_here_name_their_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "is_available", lambda device: False)
    way_out = f"ondevice retrace {tmp_path} --device cpu"
    with pytest.raises(UsageError, match=re.escape(way_out)):
        use_device("gpu", tmp_path)
