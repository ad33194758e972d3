"""Traces the graphs of a model into a folder, in a process with limits.

A bundle from elsewhere may hold any configuration, so the memory and the CPU time of tracing
are limited. Of the bundle this process reads only the manifest, from its stdin.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import read_manifest
from runtime.config.shared import DEVICES
from runtime.core.errors import BundleError
from runtime.data.process import confined, limits_argument
from runtime.machine.backend import prepare


def main(argv: list[str] | None = None) -> int:
    """Run the command; complaints go to stderr. Returns the exit code of `runtime.core.errors`."""
    parser = argparse.ArgumentParser(
        prog="python -m ondevice.cli.tracing_process", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="where the graphs go")
    parser.add_argument("--name", required=True, help="the bundle, for messages")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    limits_argument(parser)
    given = parser.parse_args(argv)
    prepare(keep_heap=False)
    return confined(given.limits, lambda: _trace(given.name, given.folder, given.device))


def _trace(name: str, folder: Path, device: str) -> None:
    manifest = read_manifest(sys.stdin.buffer.read(), name)
    check_manifest(manifest)
    from export.graph_files import trace_graphs

    try:
        trace_graphs(manifest, device, folder)
    except BundleError as problem:
        raise BundleError(f"{name}: {problem}") from None


if __name__ == "__main__":
    sys.exit(main())
