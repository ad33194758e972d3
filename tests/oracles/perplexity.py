"""Perplexity of an unchanged checkpoint, before the export quantizes it.

`python -m tests.oracles.perplexity SOURCE TOKENS --rows N` loads a checkpoint into mlx-lm's own
model in float32 and evaluates the first N rows of a token file (a run's `valid.tokens`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from runtime.machine.backend import prepare

prepare()

import msgspec  # noqa: E402

from export.sources.open import open_checkpoint  # noqa: E402
from oracles.dense import evaluate_dense  # noqa: E402
from oracles.whole_model import checkpoint_model  # noqa: E402
from runtime.data.rows import TokenRows  # noqa: E402
from runtime.run.results import Evaluation  # noqa: E402


def perplexity(source: str, tokens: Path, rows: int) -> Evaluation:
    """Loss, perplexity and accuracy of the checkpoint at `source`."""
    with open_checkpoint(source) as checkpoint:
        model = checkpoint_model(checkpoint)
        vocabulary = int(checkpoint.config["vocab_size"])
    return evaluate_dense(model, TokenRows(tokens, vocabulary), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--rows", type=int, default=0)
    arguments = parser.parse_args()
    found = perplexity(arguments.source, arguments.tokens, arguments.rows)
    print(json.dumps(msgspec.to_builtins(found)))


if __name__ == "__main__":
    main()
