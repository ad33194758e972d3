"""SIGKILL at random moments: of training, inside saves, of exports and of tracing; then again.

A killed command is repeated until it ends. What is left then must be what one that nobody killed
leaves, to the byte. Moments are drawn two ways: before the n-th change of the file system, which is
inside a save or an export more often than not and the same for the same seed, and after a random
time of the clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from support.bundles import manifest_of, rewrite
from support.files import listing
from support.mutations import Rng
from support.runs import train_arguments

from fuzz.campaign import IDENTICAL, SAID, Campaign
from fuzz.child import FAILED, SECONDS, Ended, Tell, in_child
from fuzz.kind import ondevice, sha256
from fuzz.kinds.bundles import BUDGET, export, exported
from runtime.bundle.store import WEIGHTS, open_bundle
from runtime.config.base import load
from runtime.config.train import TrainConfig
from runtime.methods.full.run_weights import open_weights

# what changes the file system, as Python audits it; os.fsync and os.pwrite, which it does not, are
# wrapped
CHANGES = (
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree",
    "shutil.copyfile", "os.link", "os.symlink",
)  # fmt: skip
MOST_KILLS = 3  # of one command
PREPARING_S = 300


class Scene(ABC):
    """A command that can be killed and repeated."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Make what the command reads."""

    @abstractmethod
    def command(self, inputs: Path, output: Path) -> int:
        """Run the command, or go on with it. Returns its exit code."""

    @abstractmethod
    def facts(self, inputs: Path, output: Path) -> Any:
        """What a command that nobody killed leaves."""


class Training(Scene):
    """Training that saves after every step and evaluates after every other."""

    method: ClassVar[str]
    steps = 4

    def prepare(self, folder: Path) -> None:
        export("random:tiny-qwen2", folder / "bundle")

    def command(self, inputs: Path, output: Path) -> int:
        if (output / "config.toml").exists():
            return ondevice("train", "--resume", output)
        more = {"eval-data": "random:9", "eval-every": 2, "eval-rows": 2}
        options = {**more, "method": self.method, "budget": BUDGET, "keep": 2}
        words = train_arguments(inputs / "bundle", output, self.steps, **options)
        return ondevice(*words, "--keep-best")

    def trained(self, inputs: Path, output: Path) -> str:
        """A checksum of what has been trained."""
        return sha256(output / "adapters.safetensors")

    def facts(self, inputs: Path, output: Path) -> Any:
        lines = (output / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        log = output / "trajectory.jsonl"
        return {
            "trained": self.trained(inputs, output),
            "steps": [entry["step"] for entry in entries],
            "losses": [entry["loss"] for entry in entries],
            "log": sha256(log) if log.exists() else None,
            "evaluations": json.loads((output / "evaluations.json").read_bytes()),
            "saves": sorted(path.name for path in (output / "saves").iterdir()),
        }


class BackpropagationKilled(Training):
    """MeBP."""

    name, method = "kill-mebp", "mebp"


class EstimationKilled(Training):
    """MeZO, whose steps are in a log."""

    name, method = "kill-mezo", "mezo"


class FullTrainingKilled(Training):
    """MeZO of all parameters, whose weights are written back while it computes."""

    name, method = "kill-full", "mezo"

    def prepare(self, folder: Path) -> None:
        code = ondevice(
            *("export", "random:tiny-gemma3", "-o", folder / "bundle", "--trainable", "full"),
            *("--seq-lens", "24", "--device", "cpu"),
        )
        assert code == 0

    def trained(self, inputs: Path, output: Path) -> str:
        config = load(TrainConfig, output / "config.toml", {})
        bundle = open_bundle(str(inputs / "bundle"))
        weights = open_weights(config, bundle, output, self.steps, writable=False)
        found = hashlib.sha256()
        for name, index in weights.owner.items():
            found.update(weights.stored(name, 0, weights.tensors[index][name][0]).tobytes())
        return found.hexdigest()


class ExportKilled(Scene):
    """An export of a tiny model."""

    name = "kill-export"

    def prepare(self, folder: Path) -> None:
        """An export of random weights reads nothing."""

    def command(self, inputs: Path, output: Path) -> int:
        if output.exists():  # it was killed after its last rename
            return ondevice("inspect", output, "--verify")
        # relative, since the manifest holds the path as it was given
        return exported("random:tiny-gemma3", Path(output.name))

    def facts(self, inputs: Path, output: Path) -> Any:
        if code := ondevice("inspect", output, "--verify"):
            raise RuntimeError(f"the bundle is not whole: exit code {code}")
        document = manifest_of(output)
        for graph in document["graphs"].values():  # MLX numbers a graph's arrays anew each time
            del graph["sha256"]
        # a kill after the last rename leaves the lock, an empty folder, for the next export to take
        beside = [path.name for path in output.parent.glob(".*.partial/*")]
        return [document, listing(output), sha256(output / WEIGHTS), beside]


class TracingKilled(Scene):
    """Training from a bundle whose graphs nobody here has traced, in a cache of its own."""

    name = "kill-tracing"

    def prepare(self, folder: Path) -> None:
        export("random:tiny-qwen2", folder / "bundle")
        document = manifest_of(folder / "bundle")
        for graph in document["graphs"].values():  # as if another machine had traced them
            path = folder / "bundle" / graph["file"]
            path.write_bytes(path.read_bytes() + b"\0")
            graph |= {"nbytes": path.stat().st_size, "sha256": sha256(path)}
        rewrite(folder / "bundle", document)

    def command(self, inputs: Path, output: Path) -> int:
        os.environ["XDG_CACHE_HOME"] = str(output.parent / "cache")
        if (output / "config.toml").exists():
            return ondevice("train", "--resume", output)
        return ondevice(*train_arguments(inputs / "bundle", output, 2, budget=BUDGET))

    def facts(self, inputs: Path, output: Path) -> Any:
        return sha256(output / "adapters.safetensors")


KILLS: dict[str, type[Scene]] = {
    scene.name: scene
    for scene in (
        BackpropagationKilled,
        EstimationKilled,
        FullTrainingKilled,
        ExportKilled,
        TracingKilled,
    )
}


class Changes:
    """Counts the changes of the file system below a folder, and dies before one of them."""

    def __init__(self, folder: Path, kill_before: int | None) -> None:
        self.folder, self.kill_before, self.count = str(folder), kill_before, 0
        self._fsync, self._pwrite = os.fsync, os.pwrite

    def watch(self) -> None:
        """Begin; there is no end, since audit hooks stay for a process's life."""
        sys.addaudithook(self._audit)
        os.fsync, os.pwrite = self._flush, self._write

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if not Path(os.fsdecode(arguments[0])).absolute().is_relative_to(self.folder):
            return
        if event == "open" and not isinstance(arguments[2], int):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        self._happen()

    def _flush(self, descriptor: Any) -> None:
        self._happen()
        self._fsync(descriptor)

    def _write(self, descriptor: Any, data: memoryview, offset: int) -> int:
        if self.count == self.kill_before:  # half of it is there
            self._pwrite(descriptor, data[: len(data) // 2], offset)
        self._happen()
        return self._pwrite(descriptor, data, offset)

    def _happen(self) -> None:
        if self.count == self.kill_before:
            os.killpg(0, signal.SIGKILL)
        self.count += 1


class Killing:
    """Kills of one scene, each counted; a command that was killed to its end counts its kills."""

    def __init__(
        self, campaign: Campaign, scene: type[Scene], seed: int, first: int, count: int
    ) -> None:
        self.campaign, self.scene = campaign, scene()
        self.seed, self.first, self.count = seed, first, count
        self.inputs = campaign.folder / "originals" / scene.name
        self.expected: Any = None
        self.changes = 0  # of the file system, by a command that nobody kills
        self.seconds = 0.0  # that it takes

    def run(self) -> Iterator[str]:
        """Kill until `count` kills have come; yields a verdict for each."""
        self._prepare()
        number, done = self.first, 0
        while done < self.count:
            kills, ended = self._case(number)
            verdict = self._verdict(ended)
            for index in range(max(1, kills)):
                last = index == max(1, kills) - 1
                self.campaign.counts.add(self.scene.name, verdict if last else IDENTICAL)
            if verdict != IDENTICAL:
                self._report(number, ended, verdict)
            yield verdict
            done += max(1, kills)
            number += max(1, kills)
            shutil.rmtree(self._folder(number - max(1, kills)), ignore_errors=True)

    def _prepare(self) -> None:
        self.inputs.mkdir(parents=True)

        def make(tell: Tell) -> int:
            self.scene.prepare(self.inputs)
            return 0

        made = in_child(make, self.inputs / "said", PREPARING_S)
        folder = self._folder(-1)
        folder.mkdir()
        begun = time.monotonic()
        ended = self._attempt(folder, None, None)
        self.seconds = time.monotonic() - begun
        if made.code or ended.code or len(ended.told) != 1:
            raise RuntimeError(f"{self.scene.name} cannot be prepared: {made}, {ended}")
        self.expected, self.changes = ended.told[0]["facts"], ended.told[0]["changes"]
        shutil.rmtree(folder)

    def _folder(self, number: int) -> Path:
        return self.campaign.folder / f"{self.scene.name}-{self.seed}-{number}"

    def _case(self, number: int) -> tuple[int, Ended]:
        """Start a command, kill it up to MOST_KILLS times, and let it end."""
        seed = [self.seed, number, *self.scene.name.encode()]
        rng = np.random.default_rng(seed)
        folder, kills = self._folder(number), 0
        folder.mkdir()
        for _ in range(int(rng.integers(1, MOST_KILLS + 1))):
            before, after_s = self._moment(rng)
            ended = self._attempt(folder, before, after_s)
            if ended.signal != signal.SIGKILL:
                break  # it had ended before its moment came, or has failed
            kills += 1
        else:
            ended = self._attempt(folder, None, None)
        return kills, ended

    def _moment(self, rng: Rng) -> tuple[int | None, float | None]:
        if rng.random() < 0.7:
            return int(rng.integers(self.changes)), None
        return None, float(rng.uniform(0, self.seconds))

    def _attempt(self, folder: Path, before: int | None, after_s: float | None) -> Ended:
        def work(tell: Tell) -> int:
            os.chdir(folder)
            changes = Changes(folder, before)
            changes.watch()
            output = folder / "output"
            code = self.scene.command(self.inputs, output)
            changes.kill_before = None
            if code == 0:
                tell({"facts": self.scene.facts(self.inputs, output), "changes": changes.count})
            return code

        return in_child(work, folder / "said", 6 * SECONDS, after_s)

    def _verdict(self, ended: Ended) -> str:
        if ended.late:
            return "hang"
        if ended.signal:
            return f"signal {signal.Signals(ended.signal).name}"
        if ended.code == FAILED:
            return "traceback"
        if ended.code:
            return f"exit code {ended.code}"
        return IDENTICAL if ended.told[-1]["facts"] == self.expected else "silent difference"

    def _report(self, number: int, ended: Ended, verdict: str) -> None:
        self.campaign.keep(
            self._folder(number),
            {
                "kind": self.scene.name,
                "seed": self.seed,
                "number": number,
                "name": "",
                "verdict": verdict,
                "changed": ended.told,
                "said": ended.said[-SAID:],
            },
        )
