"""Steps that go on where the footprint has passed the budget, in a process of their own.

`ondevice bench machine` fits its values to what they take: `python -m harness.bench.heap_process
BUNDLE --method METHOD --budget SIZE` prints the measurements, the plan and its machine as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from runtime.machine.backend import prepare

prepare()  # before MLX is loaded


from runtime.bundle.store import Bundle  # noqa: E402
from runtime.config.methods import METHODS  # noqa: E402
from runtime.config.train import TrainConfig  # noqa: E402
from runtime.core.errors import OnDeviceError  # noqa: E402
from runtime.data.samples import Samples  # noqa: E402
from runtime.data.token_rows import RANDOM_ROWS, RandomRows  # noqa: E402
from runtime.machine.footprint import Meter  # noqa: E402
from runtime.machine.machine import Machine  # noqa: E402
from runtime.methods.adapters import Adapters  # noqa: E402
from runtime.methods.protocol import Start, method  # noqa: E402
from runtime.plan.plan import Plan  # noqa: E402
from runtime.plan.planner import Planner  # noqa: E402
from runtime.run.budget import training, training_machine  # noqa: E402
from runtime.run.lora import to_train  # noqa: E402
from runtime.run.session import open_checked, open_session  # noqa: E402
from runtime.run.start import plan_training  # noqa: E402
from runtime.storage.scratch import MappedTensors  # noqa: E402


def steps(config: TrainConfig, scratch: Path) -> dict[str, Any]:
    """Train as configured: the seconds of each step but the first, and the peaks."""
    with Meter(budget_bytes=config.budget_bytes) as meter:
        config, bundle = to_train(config, open_checked(config.bundle))
        machine = training_machine(config, bundle)
        plan = plan_training(config, bundle, machine)
        manifest = bundle.manifest
        mapped = MappedTensors(scratch, "adapters", Adapters.shapes(manifest))  # as in a run
        adapters = Adapters.initial(manifest, config.seed, mapped)
        session = open_session(bundle, plan)
        begin = Start(session.model, plan, adapters, scratch, session.weights)
        running = method(config.method).start(config, begin)
        length = config.max_seq_length or manifest.usual_bucket
        rows = RandomRows(config.seed, manifest.vocab_size, length, RANDOM_ROWS)
        samples = Samples.of(config, manifest, rows)
        step_s = []
        for number in range(config.all_steps):
            start = time.perf_counter()
            running.step(number, config.highest_rate, [[samples.at(number)]])
            step_s.append(time.perf_counter() - start)
    return {
        "step_s": step_s[1:],
        "peak_footprint_bytes": meter.peak_bytes,
        "peak_rss_bytes": meter.peak_rss_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "plan": plan.to_json(),
        "kept_in_use_bytes": _kept(bundle, config, machine, plan),
        "machine_value": msgspec.to_builtins(machine),
    }


def _kept(bundle: Bundle, config: TrainConfig, machine: Machine, plan: Plan) -> int:
    """The bytes of the activations that a plan keeps, without what the heap holds beside them."""
    if not any(plan.kept):
        return 0
    task = training(config, bundle.manifest)
    model = Planner(bundle.manifest, machine).model(task, plan.sizes)
    return model.live_bytes_keeping(plan.blocks, plan.kept) - plan.live_bytes


def main(argv: list[str] | None = None) -> int:
    """Print the figures as JSON, and errors as the command line does."""
    parser = argparse.ArgumentParser(prog="python -m harness.bench.heap_process")
    parser.add_argument("bundle")
    parser.add_argument("--method", choices=tuple(METHODS), required=True)
    parser.add_argument("--budget", required=True)
    parser.add_argument("--max-seq-length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    settings = vars(parser.parse_args(argv))
    place = settings.pop("scratch")
    try:
        config = TrainConfig(data=f"random:{settings['seed']}", **settings)
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            print(json.dumps(steps(config, Path(scratch))))
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
