"""Handles `ondevice generate`: continues a prompt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ondevice.cli.handlers.common import configuration, note, set_up
from ondevice.config.generate import GenerateConfig


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(GenerateConfig, arguments)
    set_up()
    from runtime.run.generate import generate

    adapter = None if config.adapter is None else Path(config.adapter)
    pieces = generate(
        config.bundle, config.prompt, adapter, config.max_tokens, config.chat, config.device, note
    )
    if arguments.json:
        print(json.dumps({"prompt": config.prompt, "text": "".join(pieces)}))
        return
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
