"""Handles `ondevice generate`: continues a prompt."""

from __future__ import annotations

import argparse
import json

from ondevice.cli.handlers.common import configuration, note, set_up
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
        text = "".join(generating)
        print(json.dumps({"prompt": config.prompt, "text": text, **generating.facts}))
        return
    for piece in generating:
        print(piece, end="", flush=True)
    print(flush=True)
    facts = generating.facts
    note(f"{describe_generation(facts)}; {ENDED[facts['stopped']]}")
