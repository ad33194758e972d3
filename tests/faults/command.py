"""The command that disturbs runs: on which networks, how often, from which seed."""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as the runs that it compares

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.machine.backend import prepare

prepare()  # before MLX is imported

import numpy as np  # noqa: E402

from faults.network import Network  # noqa: E402
from faults.trial import EVENTS, MACHINES, METHODS, Case, disturbed, undisturbed  # noqa: E402
from ondevice.cli.main import main as ondevice  # noqa: E402

IN_START = 0.2  # the share of events that come before the first step
IN_START_S, IN_STEP_S = 6.0, 0.5  # after a process begins, or a step ends, in which they come
LOSS = 0.01


def main(words: Sequence[str] | None = None) -> int:
    """Run the trial; returns 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Train on 2 or 3 machines, network namespaces of this one, let something "
        "happen to one at a random moment, and resume with 1 to 3. Needs root, Open MPI and "
        "iproute2.",
    )
    parser.add_argument("--count", type=int, default=50, help="cases (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delays", default="0.001,0.05", help="seconds, one way")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--events", default=",".join(event.name for event in EVENTS))
    parser.add_argument("-o", "--output", type=Path, help="a file for all cases, one a line")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="ondevice-faults-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder, "cache"))
        trial = Trial(Path(folder), given)
        for number in range(given.first, given.first + given.count):
            trial.case(number)
        return trial.summary()


class Trial:
    """Cases below a folder, and what they came to."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given, self.records = folder, given, list[dict[str, Any]]()
        self.bundle = folder / "bundle"
        source = ("random:tiny-qwen3", "-o", str(self.bundle))
        if ondevice(["export", *source, "--seq-lens", "32", "--device", "cpu"]):
            raise RuntimeError("the bundle cannot be exported")
        self.alone: dict[str, Case] = {}

    def case(self, number: int) -> None:
        """Draw a case, run it, and show it in a line."""
        given, rng = self.given, np.random.default_rng([self.given.seed, number])
        method = rng.choice(given.methods.split(","))
        delay_s = float(rng.choice(given.delays.split(",")))
        name = rng.choice(given.events.split(","))
        event = next(event for event in EVENTS if event.name == name)
        machines, resumed_by = int(rng.integers(2, MACHINES + 1)), int(rng.integers(1, 4))
        rank, early = int(rng.integers(machines)), rng.random() < IN_START
        step = 0 if early else int(rng.integers(1, METHODS[method].steps + 1))
        seconds = rng.uniform(0, IN_START_S if early else IN_STEP_S)
        expected = self._alone(method)
        with Network(MACHINES, delay_s, LOSS, self.folder, number) as network:
            case = Case(self.bundle, self.folder / f"case-{number}", method, machines)
            outcome = disturbed(case, network, event, rank, (step, seconds), resumed_by, expected)
        what = {"number": number, "method": method, "delay_s": delay_s, "machines": machines}
        record = {**what, "event": event.name, "rank": rank, **asdict(outcome)}
        self.records.append(record)
        if given.output is not None:
            with given.output.open("a") as file:
                file.write(json.dumps(record) + "\n")
        shown = {name: value for name, value in record.items() if name != "said"}
        print(*shown.values(), sep=" | ", flush=True)
        if outcome.wrong:
            print(outcome.said, flush=True)

    def _alone(self, method: str) -> Case:
        if method not in self.alone:
            self.alone[method] = case = Case(self.bundle, self.folder / method, method, 1)
            undisturbed(case)
        return self.alone[method]

    def summary(self) -> int:
        """Show how often each event ended how, and the longest time."""
        for event in EVENTS:
            of = [record for record in self.records if record["event"] == event.name]
            times = [record["all_s"] for record in of if record["all_s"] is not None]
            wrong = Counter(each.split(":")[0] for record in of for each in record["wrong"])
            longest = f"{max(times):.1f} s at most" if times else "no time"
            print(f"{event.name}: {len(of)} cases, {longest}, wrong: {dict(wrong)}")
        return int(any(record["wrong"] for record in self.records))
