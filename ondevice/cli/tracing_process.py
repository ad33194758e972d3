"""Traces the graphs of a bundle into a folder, in a process with limits.

A bundle from elsewhere may hold any configuration. This process may therefore take only a limited
amount of memory and of the CPU's time. It reads nothing of the bundle but its manifest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ondevice.bundle.store import open_bundle
from ondevice.config.shared import DEVICES
from ondevice.errors import BundleError, OnDeviceError
from runtime.data.limits import TooSlowError, bounded_memory, bounded_seconds
from runtime.system.backend import prepare

MOST_BYTES, MOST_S = 16 << 30, 600


def main(argv: list[str] | None = None) -> int:
    """Run the command; complaints go to stderr. Returns the exit code of `ondevice.errors`."""
    parser = argparse.ArgumentParser(
        prog="python -m ondevice.cli.tracing_process", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path, help="where the graphs go")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    given = parser.parse_args(argv)
    try:
        _trace(given.bundle, given.folder, given.device)
    except OnDeviceError as problem:
        print(problem, file=sys.stderr)
        return problem.exit_code
    return 0


def _trace(path: Path, folder: Path, device: str) -> None:
    bundle = open_bundle(path)
    prepare(keep_heap=False)
    from export.traced import trace_graphs

    try:
        with bounded_seconds(MOST_S), bounded_memory(MOST_BYTES):
            trace_graphs(bundle.manifest, device, folder)
    except TooSlowError:
        raise BundleError(f"{path}: tracing its graphs took over {MOST_S} s") from None
    except (MemoryError, RecursionError):
        raise BundleError(f"{path}: tracing its graphs took over {MOST_BYTES >> 30} GiB") from None
    except BundleError as problem:
        raise BundleError(f"{path}: {problem}") from None


if __name__ == "__main__":
    sys.exit(main())
