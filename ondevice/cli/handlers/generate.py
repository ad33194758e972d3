"""Handles `ondevice generate`: continues a prompt."""

from __future__ import annotations

import argparse
from collections import deque

from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.screen import note, out
from runtime.config.generate import GenerateConfig

ENDED = {
    "end": "the model ended it",
    "max_tokens": "cut by --max-tokens",
    "context": "cut where the model's context is full",
}


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(GenerateConfig, arguments)
    set_up()
    from ondevice.cli.describe import describe_generation
    from runtime.run.generate import generate

    generating = generate(config, note)
    if arguments.json:
        deque(generating, maxlen=0)
        print_json(generating.result)
        return
    for piece in generating:
        out(piece, end="")
    out()
    result = generating.result
    note(f"{describe_generation(result)}; {ENDED[result.stopped]}")
