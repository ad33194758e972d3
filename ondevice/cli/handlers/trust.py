"""Handles `ondevice trust`: lets a bundle's own graphs run."""

from __future__ import annotations

import argparse
import json
import sys

from export.config.export import TrustConfig
from ondevice.cli.handlers.common import configuration, set_up
from ondevice.cli.screen import note, out
from runtime.core.errors import UsageError


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(TrustConfig, arguments)
    from ondevice.cli.describe import describe_trust
    from runtime.bundle.store import open_bundle
    from runtime.bundle.trusted import are_trusted, trust_graphs

    bundle = open_bundle(config.bundle)
    bundle.verify_small()
    manifest = bundle.manifest
    if not manifest.graphs:
        raise UsageError(f"{bundle.path} has no graphs; they are traced where it is used")
    set_up()
    from runtime.machine.backend import mlx_version

    if manifest.mlx_version != mlx_version():
        raise UsageError(
            f"the graphs of {bundle.path} were traced by MLX {manifest.mlx_version!r}, and this is "
            f"{mlx_version()}, which cannot run them; where mlx-lm is installed, ondevice traces "
            "graphs of its own"
        )
    known = are_trusted(manifest)
    if not known:
        note(describe_trust(bundle))
        if not config.yes:
            _ask("Let them run? [y/N] ")
        trust_graphs(manifest, f"trusted by ondevice trust {bundle.path}")
    if arguments.json:
        facts = {"graphs": len(manifest.graphs), "trusted_before": known}
        out(json.dumps({"bundle": str(bundle.path), **facts}))
    else:
        out(f"{bundle.path}: its graphs {'could run already' if known else 'run from now on'}")


def _ask(question: str) -> None:
    """Go on only if the user says yes, at a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask at; pass --yes to answer yes")
    note(question, end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not trusted: nothing was changed")
