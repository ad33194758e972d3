"""Finding a training method's implementation by its name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from runtime.config.methods import METHODS
from runtime.methods.protocol import Implementation


def method(name: str) -> Implementation:
    """The module of a method that `runtime.config.methods` lists."""
    return cast(Implementation, import_module(METHODS[name]))
