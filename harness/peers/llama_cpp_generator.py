"""The peer llama.cpp, by llama-cpp-python, with a GGUF file.

python -m harness.peers.llama_cpp_generator RESULT --prompt TOKENS --model FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.peers.generator import main
from harness.peers.trainer import versions


def generate(given: argparse.Namespace, prompt: list[int]) -> tuple[Iterator[int], dict[str, Any]]:
    """Load the model, and begin to generate greedily."""
    from llama_cpp import Llama

    context = len(prompt) + given.max_tokens
    model = Llama(
        str(given.model), n_ctx=context, n_threads=given.threads, n_threads_batch=given.threads,
        verbose=False,
    )  # fmt: skip

    def tokens() -> Iterator[int]:
        model.eval(prompt)
        while True:
            token = int(model.sample(temp=0.0))
            yield token
            model.eval([token])

    return tokens(), {"versions": versions(("llama-cpp-python",))}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True)


if __name__ == "__main__":
    sys.exit(main(__doc__, generate, options))
