"""What the processes of benchmarks share: common options, and figures printed as JSON.

Importing this loads nothing heavy, so that a process can be set up before MLX is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.config.train import TrainConfig
from runtime.core.errors import OnDeviceError


def process_parser(module: str, about: str | None, length: int) -> argparse.ArgumentParser:
    """The parser of a benchmark's process, with the options that all have.

    `module` is its name, `about` its docstring, `length` the default of --max-seq-length.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("bundle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", default="1GB")
    parser.add_argument("--max-seq-length", type=int, default=length)
    parser.add_argument("--scratch", type=Path, default=Path())
    return parser


def configured(given: argparse.Namespace, **settings: Any) -> TrainConfig:
    """The training that these options describe, on random data, with further settings."""
    return TrainConfig(
        bundle=given.bundle,
        budget=given.budget,
        max_seq_length=given.max_seq_length,
        data=f"random:{given.seed}",
        seed=given.seed,
        **settings,
    )


def report(scratch: Path, measure: Callable[[Path], dict[str, Any]]) -> int:
    """Print as JSON what `measure` finds, and errors as the command line does.

    `measure` is given a folder below `scratch` that is removed afterwards. Returns the exit code of
    `runtime.core.errors`.
    """
    try:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            found = measure(Path(folder))
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        return problem.exit_code
    print(json.dumps(found))
    return 0
