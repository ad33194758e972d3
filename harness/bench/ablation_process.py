"""MeZO trained without one feature, as a process of the benchmark `zo2-ablation`.

`python -m harness.bench.ablation_process BUNDLE --without FEATURE`, where FEATURE is

    prefetch         reading the next block while one computes
    single-read      reading and dequantizing a block once for all forward passes of a step
    deferred-update  updating a block when the next step visits it, not all after the step
    buffer-reuse     keeping freed memory in the process

With `--cold` the file's pages are dropped from the system's cache before each step. Invariant: no
feature changes what is computed, so the losses are the same without any of them.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runtime.system.backend import prepare

# whether the heap keeps freed memory has to be set before MLX is loaded
prepare(keep_heap="buffer-reuse" not in sys.argv)


from harness.bench.process import configured, process_parser, report  # noqa: E402
from harness.measure.page_cache import cached_share, drop  # noqa: E402
from ondevice.config.train import TrainConfig  # noqa: E402
from ondevice.errors import OnDeviceError, UsageError  # noqa: E402
from runtime.data.rows import RANDOM_ROWS, RandomRows  # noqa: E402
from runtime.methods import mezo  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.protocol import Start  # noqa: E402
from runtime.run.budget import check_budget  # noqa: E402
from runtime.run.open import open_checked, open_session  # noqa: E402
from runtime.run.samples import Samples  # noqa: E402
from runtime.run.start import plan_training  # noqa: E402
from runtime.system.footprint import Meter  # noqa: E402
from runtime.system.heap import trim_heap  # noqa: E402

FEATURES = ("prefetch", "single-read", "deferred-update", "buffer-reuse")
LEFT_CACHED = 0.05  # the largest share of a dropped file that may stay cached


def ablate(config: TrainConfig, without: str, cold: bool, scratch: Path) -> dict[str, Any]:
    """Train as configured: the time of each step, the peaks, the losses, and the cached share."""
    with Meter(budget_bytes=config.budget_bytes, relieve=trim_heap) as meter:
        bundle = open_checked(config.bundle)
        plan = plan_training(config, bundle)
        meter.aim(plan.predicted_peak_bytes)
        session = open_session(bundle, replace(plan, prefetch=without != "prefetch"))
        manifest = bundle.manifest
        adapters = Adapters.initial(manifest, config.seed)
        begin = Start(
            session.model, plan, adapters, scratch, len(manifest.blocks), manifest.hidden_size
        )
        method = dataclasses.replace(
            mezo.start(config, begin),
            lanes=1 if without == "single-read" else plan.lanes,
            defer=without != "deferred-update",
        )
        length = config.max_seq_length or manifest.usual_bucket
        rows = RandomRows(config.seed, manifest.vocab_size, length, RANDOM_ROWS)
        samples = Samples.of(config, manifest, rows)
        step_s, losses, cached = [], [], []
        for step in range(config.steps):
            if cold:
                for block in manifest.blocks:  # mapped pages are not dropped
                    session.weights.release(block)
                _drop(bundle.weights_path)
            if cold or step == 0:
                cached.append(cached_share(bundle.weights_path))
            start = time.perf_counter()
            loss = method.step(step, config.learning_rate, [[samples.at(step)]]).loss
            step_s.append(time.perf_counter() - start)
            losses.append(loss.loss_sum / loss.tokens)
            check_budget(meter, plan, "an ablation saves nothing")
    return {
        "step_s": step_s[1:],
        "losses": losses,
        "cached_share": cached,
        "peak_footprint_bytes": meter.peak_bytes,
        "peak_rss_bytes": meter.peak_rss_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "budget_bytes": plan.budget_bytes,
    }


def _drop(path: Path) -> None:
    drop(path)
    if (left := cached_share(path)) > LEFT_CACHED:
        raise OnDeviceError(
            f"this system keeps {left:.0%} of the file cached when asked to drop it"
        )


def main(argv: list[str] | None = None) -> int:
    """Print the figures as JSON, and errors as the command line does."""
    parser = process_parser("harness.bench.ablation_process", __doc__, length=256)
    parser.add_argument("--without", choices=("nothing", *FEATURES), default="nothing")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args(argv)

    def measure(scratch: Path) -> dict[str, Any]:
        if given.steps < 2:
            raise UsageError(f"--steps {given.steps}: the first step is not timed; give 2 or more")
        config = configured(given, method="mezo", steps=given.steps)
        return ablate(config, given.without, given.cold, scratch)

    return report(given.scratch, measure)


if __name__ == "__main__":
    sys.exit(main())
