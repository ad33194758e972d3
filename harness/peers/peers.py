"""`ondevice bench peers`: our training beside the usual tools, in fresh processes and in turn.

    python -m harness.peers.peers -o peers --preset qwen2.5-0.5b --python VENV/bin/python

A round runs each peer once, one after the other, on the same shapes with random weights, the same
tokens per row, batch 1, LoRA on every linear layer of the blocks and AdamW, with the same number
of threads. Invariant: a peer that cannot run is in the report with its reason, and the report says
where a figure is of a first step, which elsewhere is discarded as warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export.sources.random import PRESETS
from harness.measure.other_load import other_load
from harness.measure.paired import Sample, summarize
from harness.measure.process import ROOT, ondevice, provenance
from harness.peers.process import ALPHA, LEARNING_RATE, PREPARED, RANK, THREADS
from harness.peers.table import to_text
from ondevice.bundle.store import open_bundle
from ondevice.errors import InterruptedRunError, OnDeviceError, UsageError
from ondevice.files import storage_errors, write_atomic
from runtime.system.backend import describe

OURS = "ours"
REPORT = "peers.json"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """A program to measure: the module of its process (none: `ondevice train`) and its flags."""

    what: str
    module: str = ""
    flags: tuple[str, ...] = ()
    once: bool = False  # minutes per step: a single step, in the first round
    budget: str = ""  # of a plan that a budget would only refuse

    @property
    def as_it_comes(self) -> bool:
        """Whether it runs without our BLAS and settings."""
        return bool(self.module) and "--prepare" not in self.flags


_SLOW = sys.platform != "darwin"  # where MLX runs on the CPU, with a reference BLAS
_TORCH, _MLX_LM = "harness.peers.torch_trainer", "harness.peers.mlx_lm_trainer"
PEERS = {
    OURS: Peer("ondevice train"),
    "torch-float32": Peer("PyTorch + PEFT, float32", _TORCH, ("--dtype", "float32")),
    "torch-bfloat16": Peer("PyTorch + PEFT, bfloat16", _TORCH, ("--dtype", "bfloat16")),
    "mlx-lm-blas": Peer("mlx-lm's LoRA trainer, float32, with our BLAS", _MLX_LM, ("--prepare",)),
    "paper": Peer("ondevice train --plan paper", flags=("--plan=paper",), budget="1TB"),
    "mlx-lm": Peer("mlx-lm's LoRA trainer, float32, as it comes", _MLX_LM, once=_SLOW),
    "mlx-lm-4bit": Peer(
        "mlx-lm's LoRA trainer, 4-bit base, with our BLAS",
        _MLX_LM,
        ("--prepare", "--bits", "4"),
        once=_SLOW,
    ),
}
DEFAULT = tuple(name for name in PEERS if name != "mlx-lm-4bit")


class _CannotRunError(Exception):
    """Why a peer could not run."""


@dataclass
class _Bench:
    """One benchmark in its folder, and what it has found so far."""

    bundle: Path
    preset: str
    tokens: int
    steps: int
    budget: str
    python: str
    threads: int
    note: Note
    found: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)

    def report(self, names: Sequence[str], rounds: int) -> dict[str, Any]:
        """What is known after some rounds."""
        findings = {name: finding(name, self.found, self.failures) for name in names}
        for name, command in self.commands.items():
            findings[name]["command"] = command
        versions: dict[str, str] = {}
        for samples in self.found.values():
            for sample in samples.values():
                versions |= sample["versions"]
        return {
            "preset": self.preset,
            "tokens": self.tokens,
            "batch": 1,
            "steps": self.steps,
            "rounds": rounds,
            "budget": self.budget,
            "threads": self.threads,
            "lora": {"rank": RANK, "alpha": ALPHA, "targets": "all-linear"},
            "optimizer": "adamw",
            "machine": describe(),
            "inherited": inherited(),
            **provenance(),
            "versions": versions,
            "peers": findings,
        }

    def round(self, number: int, names: Sequence[str], last: int) -> None:
        """Run each peer once, but for those that failed or run in the first round only."""
        for name in names:
            peer = PEERS[name]
            if name in self.failures or (peer.once and number > 1):
                continue
            self.note(f"round {number} of {last}: {name} ({peer.what})")
            try:
                with environment(self.threads, peer.as_it_comes), other_load() as others:
                    run = self._process if peer.module else self._train
                    found = run(name, peer)
            except _CannotRunError as failure:
                self.failures[name] = str(failure)
                self.note(f"  {name} cannot run: {failure}")
                continue
            self.found.setdefault(name, {})[number] = {**found, "other_cores": others.cores}
            sample = Sample.of(found)
            seconds = ", ".join(f"{second:.3g}" for second in sample.step_s)
            self.note(f"  {seconds} s, {sample.training_peak_bytes / 1e6:.0f} MB")

    def _train(self, name: str, peer: Peer) -> dict[str, Any]:
        """A run of ours: the command as a user gives it, its peak that of the whole process."""
        with tempfile.TemporaryDirectory(dir=self.bundle.parent) as folder:
            run = Path(folder) / "run"
            flags = (
                "--data=random:0",
                f"--budget={peer.budget or self.budget}",
                f"--max-seq-length={self.tokens}",
                f"--steps={self.steps}",
                f"--learning-rate={LEARNING_RATE}",
                "--method=mebp",
                "--save-every=0",
                *peer.flags,
            )
            self.commands[name] = shlex.join(("ondevice", "train", self.bundle.name, *flags))
            try:
                output = ondevice("train", str(self.bundle), *flags, f"--output={run}", "--json")
            except InterruptedRunError:
                raise
            except OnDeviceError as problem:
                raise _CannotRunError(str(problem).replace(str(run), run.name)) from None
            summary = json.loads(output)
            entries = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        return {
            "step_s": [entry["seconds"] for entry in entries],
            "step_peak_bytes": None,
            "losses": [entry["loss"] for entry in entries],
            **{
                key: summary[key]
                for key in (
                    "peak_footprint_bytes",
                    "peak_rss_bytes",
                    "trainable_parameters",
                    "predicted_peak_bytes",
                )
            },
            **_prepared(),
            "threads": self.threads,
            "versions": {"mlx": summary["machine"]["mlx"]},
        }

    def _process(self, name: str, peer: Peer) -> dict[str, Any]:
        steps = 1 if peer.once else self.steps
        python = self.python if peer.module == _TORCH else sys.executable
        flags = (
            f"--preset={self.preset}",
            f"--tokens={self.tokens}",
            f"--steps={steps}",
            f"--threads={self.threads}",
            *peer.flags,
        )
        self.commands[name] = shlex.join(("python", "-m", peer.module, "RESULT", *flags))
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [python, "-P", "-m", peer.module, str(result), *flags]
            found = run_process(command, result)
        if "failed" in found:
            raise _CannotRunError(found["failed"])
        return found


def peers(
    *,
    output: Path,
    preset: str = "qwen2.5-0.5b",
    bundle: Path | None = None,
    tokens: int = 256,
    steps: int = 4,
    repeats: int = 3,
    budget: str = "400MB",
    names: Sequence[str] = DEFAULT,
    python: str = sys.executable,
    threads: int = 0,
    note: Note = lambda text: None,
) -> dict[str, Any]:
    """Measure `names` in turn, `repeats` rounds of `steps` steps; returns what peers.json holds.

    bundle: of `preset` with random weights; exported into `output` where none is given or there.
    python: the interpreter that has torch and peft.  threads: of every process (0: all cores).

    Raises:
        UsageError: a setting cannot be, or the bundle is of something else.
        InterruptedRunError: a signal arrived; peers.json has the rounds that were finished.
    """
    check(preset, tokens, steps, repeats, names, python)
    output = output.resolve()
    with storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    place = (bundle or output / f"{preset}-{tokens}").resolve()
    if not all(PEERS[name].module for name in names):
        _open(place, preset, tokens, note)
    bench = _Bench(place, preset, tokens, steps, budget, python, threads or _cores(), note)
    report: dict[str, Any] = {}
    for number in range(1, repeats + 1):
        bench.round(number, names, repeats)
        report = bench.report(names, number)
        write_atomic(output / REPORT, json.dumps(report, indent=1).encode())
    return report


def finding(
    name: str,
    found: Mapping[str, Mapping[int, dict[str, Any]]],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """What is reported of one peer: its figures where it ran, the reason where it failed."""
    result: dict[str, Any] = {"what": PEERS[name].what, "reason": failures.get(name, "")}
    rounds = found.get(name, {})
    if not rounds:
        return {**result, "outcome": "could not run"}
    samples = {number: Sample.of(one) for number, one in rounds.items()}
    ours = {number: Sample.of(one) for number, one in found.get(OURS, {}).items()}
    return {
        **result,
        "outcome": "failed later" if name in failures else "measured",
        **summarize(samples, ours if name != OURS else {}),
        "rounds": {str(number): one for number, one in rounds.items()},
    }


def run_process(command: Sequence[str], result: Path) -> dict[str, Any]:
    """Run a peer's process to its end; what it left in `result`, or {"failed": REASON}."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, errors="replace"
        )
    except OSError as problem:
        return {"failed": f"{command[0]} cannot be started: {problem.strerror}"}
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return {"failed": f"its process was ended by {name}; out of memory if not by your hand"}
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    return {"failed": f"its process ended with code {done.returncode}: {last[0]}"}


@contextmanager
def environment(threads: int, as_it_comes: bool) -> Iterator[None]:
    """Child processes use `threads` threads; as it comes: without what `prepare` sets."""
    changes: dict[str, str | None] = dict.fromkeys(THREADS, str(threads))
    if as_it_comes:
        changes |= dict.fromkeys(PREPARED)
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def inherited() -> dict[str, str]:
    """What this process was given in place of what `prepare` chooses; ours honours it."""
    return {name: os.environ[name] for name in PREPARED if name in os.environ}


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check(
    preset: str, tokens: int, steps: int, repeats: int, names: Sequence[str], python: str
) -> None:
    """Refuse settings that cannot be, see `peers`."""
    if preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    odd = [name for name in names if name not in PEERS]
    if odd or not names or len(set(names)) < len(names):
        wrong = ", ".join(odd or names) or "none"
        raise UsageError(f"peers {wrong}: choose some of {', '.join(PEERS)}, each once")
    for what, value in (("tokens", tokens), ("steps", steps), ("repeats", repeats)):
        if value < 1:
            raise UsageError(f"{what} {value} is less than 1")
    if not Path(python).is_file():
        raise UsageError(f"--python {python} is no interpreter; give the path of one")


def _open(place: Path, preset: str, tokens: int, note: Note) -> None:
    """Export the bundle, or check that the one that is there is what will be measured."""
    if not place.exists():
        note(f"exporting {preset} at {tokens} tokens")
        shape = (f"--seq-lens={tokens}", f"--lora-rank={RANK}", f"--lora-alpha={ALPHA}")
        ondevice("export", f"random:{preset}", "-o", str(place), *shape)
    manifest = open_bundle(str(place)).manifest
    source = (manifest.provenance.get("kind"), manifest.provenance.get("name"))
    lora = (manifest.lora["rank"], manifest.lora["alpha"], manifest.lora["targets"])
    if source != ("random", preset) or lora != (RANK, ALPHA, "all-linear"):
        raise UsageError(
            f"{place} is of {source[1]} with LoRA {lora}, and random:{preset} with "
            f"{(RANK, ALPHA, 'all-linear')} is to be measured; give another bundle"
        )
    if tokens not in manifest.buckets:
        raise UsageError(
            f"{place} has graphs for {', '.join(map(str, manifest.buckets))} tokens, not {tokens}; "
            f"export it with --seq-lens {tokens}, or give another bundle"
        )


def _prepared() -> dict[str, Any]:
    """BLAS and environment that a process of ours has, as such a process tells."""
    script = (
        "import json; from runtime.system.backend import prepare; "
        "from harness.peers.process import environment; "
        "print(json.dumps({'blas': prepare().blas, 'environment': environment()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.peers.peers", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("peers"))
    parser.add_argument("--preset", default="qwen2.5-0.5b")
    parser.add_argument("--bundle", type=Path, help="of the preset (else one is exported)")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="of each process, the first warm-up")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--budget", default="400MB", help="of ours")
    parser.add_argument("--peers", default=",".join(DEFAULT), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--python", default=sys.executable, help="that has torch and peft")
    parser.add_argument("--threads", type=int, default=0, help="of every process (0: all cores)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = vars(parser.parse_args(argv))
    as_json, names = given.pop("json"), given.pop("peers").split(",")

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        report = peers(**given, names=names, note=note)
    except OnDeviceError as problem:
        print(f"harness.peers.peers: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print("harness.peers.peers: interrupted", file=sys.stderr)
        return InterruptedRunError.exit_code
    print(json.dumps(report) if as_json else to_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
