"""The seconds of each part of a step, block by block, without the first: a process of `distzo2`.

`python -m harness.bench.parts_process BUNDLE --method METHOD --batch-size N`. On a CPU they are the
seconds that the process computes, which other programs do not lengthen; with a BLAS of one thread
these are the seconds of an idle machine. On a GPU they are those of the clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runtime.machine.backend import prepare

prepare()  # before MLX is loaded

from runtime.config.methods import METHODS  # noqa: E402
from runtime.config.train import TrainConfig  # noqa: E402
from runtime.core.errors import OnDeviceError  # noqa: E402
from runtime.data.rows import RANDOM_ROWS, RandomRows  # noqa: E402
from runtime.data.samples import Samples  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.protocol import Start, method  # noqa: E402
from runtime.run.budget import training_machine  # noqa: E402
from runtime.run.lora import to_train  # noqa: E402
from runtime.run.session import open_checked, open_session  # noqa: E402
from runtime.run.start import plan_training  # noqa: E402


def parts(config: TrainConfig, scratch: Path) -> dict[str, Any]:
    """Train as configured: the profile of all steps but the first."""
    config, bundle = to_train(config, open_checked(config.bundle))
    manifest = bundle.manifest
    plan = plan_training(config, bundle, training_machine(config, bundle))
    session = open_session(bundle, plan)
    adapters = Adapters.initial(manifest, config.seed)
    begin = Start(
        session.model,
        plan,
        adapters,
        scratch,
        len(manifest.blocks),
        manifest.widest,
        session.weights,
    )
    running = method(config.method).start(config, begin)
    length = config.max_seq_length or manifest.usual_bucket
    rows = RandomRows(config.seed, manifest.vocab_size, length, RANDOM_ROWS)
    samples = Samples.of(config, manifest, rows)
    profile = session.profile
    if manifest.device == "cpu":
        profile.clock = time.process_time
    profile.on = True
    for number in range(config.all_steps):
        if number == 1:
            profile.clear()
        first = number * config.batch_size
        batch = [samples.at(first + row) for row in range(config.batch_size)]
        running.step(number, config.highest_rate, [batch])
    return {
        **profile.to_json(config.all_steps - 1),
        "adapter_parameters": adapters.size,
        "layers": len(manifest.layers),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the parts as JSON, and errors as the command line does."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.parts_process")
    parser.add_argument("bundle")
    parser.add_argument("--method", choices=tuple(METHODS), default="mezo")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-seq-length", type=int, default=64)
    parser.add_argument("--budget", default="1GB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(argv))
    try:
        config = TrainConfig(data=f"random:{given['seed']}", **given)
        with tempfile.TemporaryDirectory() as scratch:
            measured = parts(config, Path(scratch))
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        return problem.exit_code
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
