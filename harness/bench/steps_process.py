"""Steps outside of a run, without one feature: of `zo2-ablation`, `zo2-full`, `machine`.

`python -m harness.bench.steps_process BUNDLE --without FEATURE`, where FEATURE is

    prefetch         reading the next block while one computes
    single-read      reading and dequantizing a block once for all forward passes of a step
    deferred-update  updating a block when the next step visits it, not all after the step
    buffer-reuse     keeping freed memory in the process
    budget           ending where the footprint has passed the budget
    disk             weights on disk: all are in memory, as in MeZO's Algorithm 1

or `nothing`. Methods that run backward have neither of `single-read` and `deferred-update`.
A bundle that was exported with `--trainable full` is trained in full, any other by adapters; `disk`
is for the former. With `--cold` the pages of the weights' files are dropped from the system's cache
before each step. With `--profile` the JSON has the seconds of each part, block by block, of all
steps but the first: on a CPU those that the process computes, which other programs do not lengthen;
with a BLAS of one thread these are the seconds of an idle machine. Invariant: but for `disk`, which
rounds differently, no feature changes the computation, so the losses are the same without any.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from runtime.machine.backend import prepare

# whether the heap keeps freed memory has to be set before MLX is loaded
prepare(keep_heap="buffer-reuse" not in sys.argv)


from harness.measure.page_cache import cached_share, drop  # noqa: E402
from harness.measure.provenance import repository_only  # noqa: E402
from runtime.arrays.profile import Profile  # noqa: E402
from runtime.bundle.manifest import Manifest  # noqa: E402
from runtime.bundle.store import Bundle, open_bundle  # noqa: E402
from runtime.config.methods import METHODS  # noqa: E402
from runtime.config.train import TrainConfig  # noqa: E402
from runtime.core.errors import OnDeviceError, UsageError  # noqa: E402
from runtime.data.rows import RANDOM_ROWS, RandomRows  # noqa: E402
from runtime.data.samples import Samples  # noqa: E402
from runtime.engine.sample import Sample  # noqa: E402
from runtime.machine.footprint import Meter  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.full.row_noise import RowNoise  # noqa: E402
from runtime.methods.full.weights import FullWeights  # noqa: E402
from runtime.methods.protocol import Start, StepLoss, method  # noqa: E402
from runtime.methods.zeroth.zeroth_order import ZerothOrder  # noqa: E402
from runtime.plan.plan import Plan  # noqa: E402
from runtime.run.budget import check_budget, training_machine  # noqa: E402
from runtime.run.lora import to_train  # noqa: E402
from runtime.run.session import open_checked, open_session  # noqa: E402
from runtime.run.start import plan_training  # noqa: E402
from runtime.storage.saves import SLOTS  # noqa: E402
from runtime.storage.scratch import MappedTensors  # noqa: E402

FEATURES = ("prefetch", "single-read", "deferred-update", "buffer-reuse", "budget", "disk")
OF_FORWARD_ONLY: dict[str, dict[str, Any]] = {
    "single-read": {"lanes": 1},
    "deferred-update": {"defer": False},
}
RATE = 1e-7  # of all parameters; the default is for adapters
LEFT_CACHED = 0.05  # the largest share of a dropped file that may stay cached


def steps(
    config: TrainConfig, without: str, cold: bool, profiled: bool, scratch: Path
) -> dict[str, Any]:
    """Train as configured: the time of each step, the peaks, the losses, and the cached share."""
    with Meter(budget_bytes=config.budget_bytes) as meter:
        config, bundle = to_train(config, open_checked(config.bundle))
        machine = training_machine(config, bundle)
        plan = plan_training(config, bundle, machine)
        manifest = bundle.manifest
        step, release, profile = _method(config, bundle, plan, without, scratch)
        if profiled and manifest.device == "cpu":
            profile.clock = time.process_time
        profile.on = profiled
        length = config.max_seq_length or manifest.usual_bucket
        rows = RandomRows(config.seed, manifest.vocab_size, length, RANDOM_ROWS)
        samples = Samples.of(config, manifest, rows)
        files = [path for path in (bundle.weights_path, scratch / SLOTS) if path.exists()]
        step_s, losses, cached = [], [], []
        for number in range(config.all_steps):
            if cold:
                release()  # mapped pages are not dropped
                for path in files:
                    _drop(path)
            if cold or number == 0:
                cached.append(cached_share(bundle.weights_path))
            if number == 1:
                profile.clear()
            first = number * config.batch_size
            batch = [samples.at(first + row) for row in range(config.batch_size)]
            start = time.perf_counter()
            loss = step(number, batch)
            step_s.append(time.perf_counter() - start)
            losses.append(loss.loss_sum / loss.scored_tokens)
            if without not in ("budget", "disk"):
                check_budget(meter, plan, "an ablation saves nothing")
    return {
        "step_s": step_s[1:],
        "losses": losses,
        "cached_share": cached,
        "peak_footprint_bytes": meter.peak_bytes,
        "peak_rss_bytes": meter.peak_rss_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "plan": plan.to_json(),
        "machine_value": msgspec.to_builtins(machine),
        **(_parts(profile, config.all_steps - 1, manifest) if profiled else {}),
    }


def _parts(profile: Profile, steps: int, manifest: Manifest) -> dict[str, Any]:
    adapted = sum(math.prod(shape) for shape in Adapters.shapes(manifest).values())
    layers = {"layers": len(manifest.layers), "adapter_parameters": adapted}
    return {**profile.to_json(steps), **layers}


def _method(
    config: TrainConfig, bundle: Bundle, plan: Plan, without: str, scratch: Path
) -> tuple[Callable[[int, list[Sample]], StepLoss], Callable[[], None], Profile]:
    """How a step is taken, how the mapped pages of the weights are released, and the profile."""
    manifest = bundle.manifest
    prefetch = plan.prefetch and without != "prefetch"
    planned = replace(plan, prefetch=prefetch)
    mapped = MappedTensors(scratch, "adapters", Adapters.shapes(manifest))  # as in a run
    adapters = Adapters.initial(manifest, config.seed, mapped)
    weights: FullWeights | None = None
    if config.trains_all:
        from runtime.methods.full.run_weights import open_weights  # heavier than adapters need

        if without == "disk":
            with repository_only():
                from harness.peers.in_memory import (  # takes 40 MB
                    InMemoryMeZO,
                    MemoryWeights,
                    all_weights,
                )

            memory = MemoryWeights(bundle, all_weights(bundle))
            session = open_session(bundle, planned, memory)
            noise = RowNoise(config.seed, config.noise_kind)
            published = InMemoryMeZO(memory, session.model, adapters, noise, config.epsilon)
            rate = config.highest_rate
            return (
                lambda number, batch: published.step(number, rate, batch),
                lambda: None,
                session.profile,
            )
        weights = open_weights(config, bundle, scratch, 0, prefetch)
    elif without == "disk":
        raise UsageError("--without disk: the adapters of this bundle are in memory anyway")
    session = open_session(bundle, planned, weights)
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
    if without in OF_FORWARD_ONLY:
        if not isinstance(running, ZerothOrder):
            raise UsageError(f"--without {without}: {config.method} has no such feature")
        running = dataclasses.replace(running, **OF_FORWARD_ONLY[without])

    def release() -> None:
        for block in manifest.blocks:
            session.weights.release(block)

    return (
        lambda number, batch: running.step(number, config.highest_rate, [batch]).loss,
        release,
        session.profile,
    )


def _drop(path: Path) -> None:
    drop(path)
    if (left := cached_share(path)) > LEFT_CACHED:
        raise OnDeviceError(
            f"this system keeps {left:.0%} of the file cached when asked to drop it"
        )


def main(argv: list[str] | None = None) -> int:
    """Print the figures as JSON, and errors as the command line does."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.bench.steps_process",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", default="1GB")
    parser.add_argument("--max-seq-length", type=int, default=256)
    parser.add_argument("--scratch", type=Path, default=Path())
    parser.add_argument("--method", choices=tuple(METHODS), default="mezo")
    parser.add_argument("--without", choices=("nothing", *FEATURES), default="nothing")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args(argv)
    try:
        figures = _measure(given)
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        return problem.exit_code
    print(json.dumps(figures))
    return 0


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    if given.steps < 2:
        raise UsageError(f"--steps {given.steps}: the first step is not timed; give 2 or more")
    full = open_bundle(given.bundle).manifest.trainable == "full"
    rate: dict[str, Any] = {"learning_rate": RATE} if full else {}
    config = TrainConfig(
        bundle=given.bundle,
        method=given.method,
        steps=given.steps,
        budget=given.budget,
        max_seq_length=given.max_seq_length,
        batch_size=given.batch_size,
        data=f"random:{given.seed}",
        seed=given.seed,
        **rate,
    )
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        return steps(config, given.without, given.cold, given.profile, Path(scratch))


if __name__ == "__main__":
    sys.exit(main())
