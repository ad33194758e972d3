"""Tests that are run briefly in the gate and at length in `make test-all`."""

from __future__ import annotations

import pytest


def at_length(name: str, few: int, many: int) -> pytest.MarkDecorator:
    """The parameter `name`: `few` in the gate, `many` where slow tests are asked for."""
    return pytest.mark.parametrize(name, [few, pytest.param(many, marks=pytest.mark.slow)])
