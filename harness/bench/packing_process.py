"""An epoch over short rows, packed or not, as a process of the benchmark `packing`.

`python -m harness.bench.packing_process BUNDLE --pack` trains on random rows of 10
to 60 tokens, all of them scored, and prints as JSON the seconds of one epoch: those that passed,
and those that the process computed, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from runtime.machine.backend import prepare

prepare()

from harness.bench.process import configured, process_parser, report  # noqa: E402
from harness.bench.short_rows import LONGEST, ShortRows  # noqa: E402
from runtime.config.methods import METHODS  # noqa: E402
from runtime.config.train import TrainConfig  # noqa: E402
from runtime.core.errors import UsageError  # noqa: E402
from runtime.data.samples import Samples  # noqa: E402
from runtime.machine.footprint import Meter  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.protocol import Start, method  # noqa: E402
from runtime.run.budget import check_budget  # noqa: E402
from runtime.run.open import open_checked, open_session  # noqa: E402
from runtime.run.start import plan_training  # noqa: E402
from runtime.storage.scratch import MappedTensors  # noqa: E402

WARM_STEPS = 2  # before the epoch that is timed


def train_epoch(config: TrainConfig, scratch: Path) -> dict[str, Any]:
    """Train for one epoch: its seconds, what was computed, and the peaks."""
    with Meter(budget_bytes=config.budget_bytes) as meter:
        bundle = open_checked(config.bundle)
        manifest = bundle.manifest
        plan = plan_training(config, bundle)
        rows = ShortRows(config.seed, manifest.vocab_size)
        samples = Samples.of(config, manifest, rows)
        session = open_session(bundle, plan)
        tensors = MappedTensors(scratch, "adapters", Adapters.shapes(manifest))
        adapters = Adapters.initial(manifest, config.seed, tensors)
        blocks, width = len(manifest.blocks), manifest.hidden_size
        begin = Start(session.model, plan, adapters, scratch, blocks, width, session.weights)
        running = method(config.method).start(config, begin)
        steps = math.ceil(len(samples) / config.batch_size)
        computed = 0
        wall = cpu = 0.0
        for step in range(-WARM_STEPS, steps):
            if step == 0:
                wall, cpu = time.perf_counter(), time.process_time()
            first = max(step, 0) * config.batch_size
            places = range(first, min(first + config.batch_size, len(samples)))
            batch = [samples.at(place) for place in places]
            running.step(step + WARM_STEPS, config.learning_rate, [batch])
            check_budget(meter, plan, "a benchmark saves nothing")
            bucket = session.model(max(len(one.inputs) for one in batch)).bucket
            computed += len(batch) * bucket if step >= 0 else 0
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "epoch_s": wall,
        "epoch_cpu_s": cpu,
        "step_s": [wall / steps],
        "steps": steps,
        "tokens": int(rows.lengths.sum()),
        "computed_tokens": computed,
        "peak_footprint_bytes": meter.peak_bytes,
        "peak_rss_bytes": meter.peak_rss_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "budget_bytes": plan.budget_bytes,
    }


def main(argv: list[str] | None = None) -> int:
    """Print the figures as JSON, and errors as the command line does."""
    parser = process_parser("harness.bench.packing_process", __doc__, length=LONGEST)
    parser.add_argument("--pack", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--batch-size", type=int, default=1)
    given = parser.parse_args(argv)

    def measure(scratch: Path) -> dict[str, Any]:
        if given.max_seq_length < LONGEST:
            raise UsageError(
                f"--max-seq-length {given.max_seq_length} < {LONGEST}, the tokens of the longest "
                f"row; give {LONGEST} or more"
            )
        settings = {"method": given.method, "batch_size": given.batch_size, "pack": given.pack}
        return train_epoch(configured(given, **settings), scratch)

    return report(given.scratch, measure)


if __name__ == "__main__":
    sys.exit(main())
