"""A tiny bundle that the tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bundles import Tiny


@pytest.fixture(scope="session")
def bundle(tiny: Tiny) -> Path:
    return tiny("qwen2", seq_lens=(16, 32), device="auto").path
