"""A training process that never gives free heap memory back, to measure the prediction's error.

`ondevice train` gives it back near the predicted peak, and stops when it exceeds its budget. Here
neither happens, so that the error of the prediction itself is visible.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from runtime.machine.backend import prepare

prepare()

import mlx.core as mx  # noqa: E402
import msgspec  # noqa: E402

from harness.bench.process import configured, process_parser, report  # noqa: E402
from runtime.config.methods import METHODS  # noqa: E402
from runtime.config.train import TrainConfig  # noqa: E402
from runtime.data.rows import RANDOM_ROWS, RandomRows  # noqa: E402
from runtime.machine.footprint import Meter  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.protocol import Start  # noqa: E402
from runtime.methods.registry import method  # noqa: E402
from runtime.run.budget import training_machine  # noqa: E402
from runtime.run.open import open_checked, open_session  # noqa: E402
from runtime.run.samples import Samples  # noqa: E402
from runtime.run.start import plan_training  # noqa: E402
from runtime.storage.scratch import MappedTensors  # noqa: E402


def train_unaided(config: TrainConfig, scratch: Path) -> dict[str, Any]:
    """Train as configured: the time of each step but the first, the peaks, and the plan."""
    with Meter() as meter:
        bundle = open_checked(config.bundle)
        manifest = bundle.manifest
        machine = training_machine(config, bundle)
        plan = plan_training(config, bundle, machine)
        session = open_session(bundle, plan)
        tensors = MappedTensors(scratch, "adapters", Adapters.shapes(manifest))
        adapters = Adapters.initial(manifest, config.seed, tensors)
        blocks, width = len(manifest.blocks), manifest.hidden_size
        begin = Start(session.model, plan, adapters, scratch, blocks, width)
        running = method(config.method).start(config, begin)
        length = config.max_seq_length or manifest.usual_bucket
        rows = RandomRows(config.seed, manifest.vocab_size, length, RANDOM_ROWS)
        samples = Samples.of(config, manifest, rows)
        step_s = []
        for step in range(config.steps):
            start = time.perf_counter()
            running.step(step, config.learning_rate, [[samples.at(step)]])
            step_s.append(time.perf_counter() - start)
    return {
        "step_s": step_s[1:],
        "peak_footprint_bytes": meter.peak_bytes,
        "peak_rss_bytes": meter.peak_rss_bytes,
        "mlx_peak_bytes": mx.get_peak_memory(),
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "plan": plan.to_json(),
        "machine_value": msgspec.to_builtins(machine),
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures as JSON, and errors as the command line does."""
    parser = process_parser("harness.bench.unaided_process", __doc__, length=256)
    parser.add_argument("--method", choices=tuple(METHODS), required=True)
    parser.add_argument("--steps", type=int, default=2)
    given = parser.parse_args(argv)

    def measure(scratch: Path) -> dict[str, Any]:
        config = configured(given, method=given.method, steps=given.steps)
        return train_unaided(config, scratch)

    return report(given.scratch, measure)


if __name__ == "__main__":
    sys.exit(main())
