"""Tiny models cut into programs, with changed configurations."""

from __future__ import annotations

from typing import Any

from export.cut.model import cut_model
from export.sources.random import PRESETS
from runtime.operations.elementwise import Elementwise
from runtime.operations.program import BlockType


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**PRESETS[f"tiny-{family}"], **changes}


def cut_of(family: str, **changes: Any) -> Any:
    config = config_of(family, **changes)
    return cut_model(str(config["model_type"]), config)


def elementwise_of(block_type: BlockType) -> list[Elementwise]:
    return [op for op in block_type.operations if isinstance(op, Elementwise)]
