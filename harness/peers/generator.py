"""The peers that generate: mlx-lm's `generate_step`, and llama.cpp by llama-cpp-python.

    python -m harness.peers.generator RESULT mlx-lm --prompt TOKENS --model BUNDLE [--bits 8]
    python -m harness.peers.generator RESULT llama.cpp --prompt TOKENS --model GGUF

A peer is measured by the same meter as ours (`runtime.machine.footprint`): the peak while it loads,
and that while it generates. It writes one JSON file with its measurements, or the reason why there
are none. mlx-lm's weights are float32 without `--bits`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.peers.trainer import environment, let_mlx_compile, versions
from runtime.machine.footprint import Meter

GROUP_SIZE = 64


def mlx_lm(given: argparse.Namespace, prompt: list[int]) -> tuple[Iterator[int], dict[str, Any]]:
    """Begin to generate greedily by mlx-lm, with a bundle's weights, and our BLAS and settings."""
    from runtime.machine.backend import prepare

    blas = prepare().blas
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers would load it
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.generate import generate_step

    from harness.peers.in_memory import dense_model
    from runtime.bundle.store import open_bundle

    mx.set_default_device(mx.cpu)
    model = dense_model(open_bundle(given.model))
    let_mlx_compile()
    if given.bits:
        nn.quantize(model, group_size=GROUP_SIZE, bits=given.bits)
    mx.eval(model.parameters())
    mx.clear_cache()

    def tokens() -> Iterator[int]:
        for token, _ in generate_step(mx.array(prompt), model, max_tokens=given.max_tokens):
            yield int(token)

    return tokens(), {"blas": blas, "versions": versions(("mlx", "mlx-lm"))}


def llama_cpp(given: argparse.Namespace, prompt: list[int]) -> tuple[Iterator[int], dict[str, Any]]:
    """Begin to generate greedily by llama-cpp-python, with a GGUF file."""
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


PEERS = {"mlx-lm": mlx_lm, "llama.cpp": llama_cpp}


def main() -> int:
    """Run a peer with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--prompt", type=Path, required=True, help="JSON list of tokens")
    parser.add_argument("--model", type=Path, required=True, help="a bundle, or a GGUF file")
    parser.add_argument("--bits", type=int, choices=(0, 4, 8), default=0, help="of mlx-lm")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    try:
        measured = _measured(given, json.loads(given.prompt.read_text()))
    except ImportError as problem:
        name = (problem.name or str(problem)).partition(".")[0]
        measured = {"failed": f"{name} cannot be imported by {sys.executable}"}
    given.result.write_text(json.dumps(measured))
    return int("failed" in measured)


def _measured(given: argparse.Namespace, prompt: list[int]) -> dict[str, Any]:
    with Meter() as meter:
        tokens, facts = PEERS[given.peer](given, prompt)
        loading_peak_bytes = meter.peak_bytes
        meter.reset_peak()
        start = time.perf_counter()
        said = [next(tokens)]
        prompt_s = time.perf_counter() - start
        for token in tokens:
            said.append(token)
            if len(said) == given.max_tokens:
                break
        seconds = time.perf_counter() - start - prompt_s
        peak_bytes, peak_rss_bytes = meter.peak_bytes, meter.peak_rss_bytes
    return {
        "prompt_tokens_per_s": len(prompt) / prompt_s,
        "tokens_per_s": (len(said) - 1) / seconds,
        "tokens": said,
        "loading_peak_bytes": loading_peak_bytes,
        "peak_footprint_bytes": peak_bytes,
        "peak_rss_bytes": peak_rss_bytes,
        **facts,
        "environment": environment(),
    }


if __name__ == "__main__":
    sys.exit(main())
