"""The peer mlx-lm: its own model and `generate_step`, with the weights of a bundle.

    python -m harness.peers.mlx_lm_generator RESULT --prompt TOKENS --bundle BUNDLE [--bits 8]

Without `--bits` the weights are float32. The process has our BLAS, allocator settings and
run-ahead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.peers.generator import main
from harness.peers.trainer import versions
from runtime.machine.backend import prepare

GROUP_SIZE = 64


def generate(given: argparse.Namespace, prompt: list[int]) -> tuple[Iterator[int], dict[str, Any]]:
    """Load the model, and begin to generate greedily."""
    blas = prepare().blas
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would load it
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.generate import generate_step

    from harness.peers.whole_model import dense_model
    from runtime.bundle.store import open_bundle

    mx.set_default_device(mx.cpu)
    model = dense_model(open_bundle(given.bundle))
    if given.bits:
        nn.quantize(model, group_size=GROUP_SIZE, bits=given.bits)
    mx.eval(model.parameters())
    mx.clear_cache()

    def tokens() -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=given.max_tokens):
            yield int(token)

    return tokens(), {"blas": blas, "versions": versions(("mlx", "mlx-lm"))}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--bits", type=int, choices=(0, 4, 8), default=0)


if __name__ == "__main__":
    sys.exit(main(__doc__, generate, options))
