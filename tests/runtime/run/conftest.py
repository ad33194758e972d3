"""A tiny bundle that the tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import ondevice


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    done = ondevice("export", "random:tiny-gemma3", "-o", path, "--seq-lens", "16,32")
    assert done.returncode == 0, done.stderr
    return path
