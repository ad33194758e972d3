"""Handles `ondevice completion`: prints a shell's script."""

from __future__ import annotations

import argparse
import json

from ondevice.cli.completion_config import CompletionConfig
from ondevice.cli.handlers.common import configuration


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(CompletionConfig, arguments)
    from ondevice.cli.completion import script_of

    script = script_of(config.shell)
    print(json.dumps({"shell": config.shell, "script": script}) if arguments.json else script)
