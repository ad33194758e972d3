"""Prompts continued as `ondevice generate` does, and what the dense model makes of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from oracles import whole_model as reference

from runtime.bundle.store import Bundle
from runtime.config.generate import GenerateConfig
from runtime.methods.adapters import Adapters
from runtime.run.generate import Generating


def generating(bundle: Bundle | Path | str, prompt: str, **options: Any) -> Generating:
    """What continues the prompt, with options as `GenerateConfig` has them."""
    path = bundle.path if isinstance(bundle, Bundle) else bundle
    return Generating(GenerateConfig(bundle=str(path), prompt=prompt, **options))


def pieces(
    bundle: Bundle | Path | str, prompt: str, adapter: Path | None, most: int, chat: bool = False
) -> Iterator[str]:
    """The pieces of a continuation of at most so many tokens."""
    path = None if adapter is None else str(adapter)
    return iter(generating(bundle, prompt, adapter=path, max_tokens=most, chat=chat))


def dense_logits(
    bundle: Bundle, adapters: Adapters | None, tokens: list[int]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits (T, V) of the dense model after each token."""
    return np.array(reference.dense_model(bundle, adapters)(mx.array(tokens)[None])[0])


def continued(bundle: Bundle, tokens: list[int], count: int, end: int | None = None) -> list[int]:
    """`count` tokens that the dense model finds most likely, one after the other, up to `end`."""
    model, said = reference.dense_model(bundle), list(tokens)
    for _ in range(count):
        token = int(mx.argmax(model(mx.array(said)[None])[0, -1]).item())
        if token == end:
            break
        said.append(token)
    return said[len(tokens) :]
