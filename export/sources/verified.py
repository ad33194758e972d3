"""The model types whose logits have been compared with those of transformers' own classes.

`model_types.json` has for each type of mlx-lm how far the logits of tiny random models are apart,
relative to the largest logit, or why they were not compared. `python -m tests.model_types` writes
it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from export.sources.source import Checkpoint
from runtime.core.errors import UsageError

FILE = Path(__file__).with_name("model_types.json")
CLOSE = 1e-5  # the largest difference of a verified type


@cache
def tried_types() -> dict[str, float | str]:
    """Each model type, by transformers' name: how far its logits are apart, or why no one knows."""
    states: dict[str, float | str] = json.loads(FILE.read_text())
    return states


def is_verified(model_type: str) -> bool:
    """Whether a type's logits are those of transformers."""
    state = tried_types().get(model_type)
    return isinstance(state, float) and state <= CLOSE


def unverified(checkpoint: Checkpoint, allowed: bool) -> list[str]:
    """A warning where a checkpoint's type has not been verified.

    Raises UsageError where that is not `allowed`.
    """
    text = checkpoint.given.get("model_type")
    model_type = str(checkpoint.provenance.get("model_type", text))
    inside = text if text in tried_types() else model_type
    if text is None or (is_verified(model_type) and is_verified(inside)):
        return []
    said = (
        f"model type {model_type!r} has not been compared with transformers: its results may "
        "differ from the original model's"
    )
    if not allowed:
        raise UsageError(f"{checkpoint.provenance['name']}: {said}; to export it, add --unverified")
    return [said]
