"""What every peer's process that generates shares: its options, its measurements, its file.

A peer is measured by the same meter as ours (`runtime.machine.footprint`): the peak while it loads,
and that while it generates. It writes one JSON file with its measurements, or the reason why there
are none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.peers.trainer import environment
from runtime.machine.footprint import Meter

Generate = Callable[[argparse.Namespace, list[int]], tuple[Iterator[int], dict[str, Any]]]


def main(purpose: str | None, generate: Generate, options: Callable[..., object]) -> int:
    """Run a peer with the options of its command line.

    generate: loads the model, and returns an iterator over the tokens that continue a prompt, and
    further facts.  options: adds the peer's own options.
    """
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--prompt", type=Path, required=True, help="JSON list of tokens")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options(parser)
    given = parser.parse_args()
    try:
        found = _measured(given, json.loads(given.prompt.read_text()), generate)
    except ImportError as problem:
        name = (problem.name or str(problem)).partition(".")[0]
        found = {"failed": f"{name} cannot be imported by {sys.executable}"}
    given.result.write_text(json.dumps(found))
    return int("failed" in found)


def _measured(given: argparse.Namespace, prompt: list[int], generate: Generate) -> dict[str, Any]:
    with Meter() as meter:
        tokens, facts = generate(given, prompt)
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
