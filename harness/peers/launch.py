"""The programs that are measured beside each other, and running one of them in a fresh process.

Every program trains the same shapes with random weights on the same number of random tokens: batch
1, LoRA on every linear layer of the blocks, AdamW, and the same number of threads.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.measure.command import ondevice
from harness.measure.other_load import other_load
from harness.measure.process import run
from harness.measure.repeats import Process
from harness.peers.trainer import LEARNING_RATE, PREPARED, THREADS
from runtime.core.errors import InterruptedRunError, OnDeviceError

OURS = "ours"
METHOD = "mebp"  # exact gradients, as the peers compute them
TORCH, MLX_LM = "harness.peers.torch_trainer", "harness.peers.mlx_lm_trainer"


@dataclass(frozen=True)
class Program:
    """A program to measure: the module of its process (none: `ondevice train`) and its flags."""

    purpose: str
    module: str = ""
    flags: tuple[str, ...] = ()
    once: bool = False  # a step takes minutes: one process of a single step is enough

    @property
    def as_it_comes(self) -> bool:
        """Whether it runs without our BLAS and settings."""
        return bool(self.module) and "--prepare" not in self.flags


_SLOW = sys.platform != "darwin"  # where MLX runs on the CPU, with a reference BLAS
PROGRAMS = {
    OURS: Program("ondevice train"),
    "torch-float32": Program("PyTorch + PEFT, float32", TORCH, ("--dtype", "float32")),
    "torch-bfloat16": Program("PyTorch + PEFT, bfloat16", TORCH, ("--dtype", "bfloat16")),
    "mlx-lm-blas": Program("mlx-lm's LoRA trainer, float32, with our BLAS", MLX_LM, ("--prepare",)),
    "mlx-lm": Program("mlx-lm's LoRA trainer, float32, as it comes", MLX_LM, once=_SLOW),
    "mlx-lm-4bit": Program(
        "mlx-lm's LoRA trainer, 4-bit base, with our BLAS",
        MLX_LM,
        ("--prepare", "--bits", "4"),
        once=_SLOW,
    ),
}
DEFAULT = tuple(name for name in PROGRAMS if name != "mlx-lm-4bit")


@dataclass(frozen=True)
class Setup:
    """The model that every program trains, and the means to do so.

    bundle: of the model named `preset`, for ours, which computes products in `compute_dtype`.
    python: the interpreter that has torch and peft.  scratch: a folder for runs.
    """

    bundle: Path
    preset: str
    tokens: int
    steps: int
    budget: str
    python: str
    threads: int
    scratch: Path
    compute_dtype: str = "float32"

    def measure(self, name: str) -> Process:
        """One process of a program, its command, and how busy other programs kept the machine.

        `step_s` leaves the first step out as a warm-up, unless it is the only one.

        Raises:
            OnDeviceError: the program cannot run here.
        """
        program = PROGRAMS[name]
        with environment(self.threads, program.as_it_comes), other_load() as others:
            measured = self._peer(program) if program.module else self._ours()
        seconds = measured["step_s"]
        return {
            **measured,
            "step_s": seconds[1:] or seconds,
            "warm_up_steps": min(1, len(seconds) - 1),
            "other_cores": others.cores,
        }

    def _ours(self) -> dict[str, Any]:
        """A run of `ondevice train`, as a user starts it."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            place = Path(folder) / "run"
            flags = (
                "--data=random:0",
                f"--budget={self.budget}",
                f"--max-seq-length={self.tokens}",
                f"--steps={self.steps}",
                f"--learning-rate={LEARNING_RATE}",
                f"--method={METHOD}",
                f"--compute-dtype={self.compute_dtype}",
                "--save-every=0",
            )
            output = ondevice("train", str(self.bundle), *flags, f"--output={place}", "--json")
            summary = json.loads(output)
            lines = (place / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        keys = ("peak_footprint_bytes", "peak_rss_bytes", "trainable_parameters")
        return {
            "command": shlex.join(("ondevice", "train", self.bundle.name, *flags)),
            "step_s": [entry["seconds"] for entry in entries],
            "training_peak_bytes": summary["peak_footprint_bytes"],
            "losses": [entry["loss"] for entry in entries],
            **{key: summary[key] for key in (*keys, "predicted_peak_bytes")},
            **_prepared(),
            "threads": self.threads,
            "versions": {"mlx": summary["machine"]["mlx"]},
        }

    def _peer(self, program: Program) -> dict[str, Any]:
        steps = 1 if program.once else self.steps
        python = self.python if program.module == TORCH else sys.executable
        flags = (
            f"--preset={self.preset}",
            f"--tokens={self.tokens}",
            f"--steps={steps}",
            f"--threads={self.threads}",
            *program.flags,
        )
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            measured = run_peer([python, "-P", "-m", program.module, str(result), *flags], result)
        command = shlex.join(("python", "-m", program.module, "RESULT", *flags))
        return {"command": command, **measured}


def run_peer(command: Sequence[str], result: Path) -> dict[str, Any]:
    """Run a peer's process to its end; returns the measurements that it wrote to `result`.

    Raises:
        OnDeviceError: it could not run, with its reason.
        InterruptedRunError: a signal arrived.
    """
    try:
        ended = run(command)
    except OSError as problem:
        raise OnDeviceError(f"{command[0]} cannot be started: {problem.strerror}") from None
    if ended.interrupted:
        raise InterruptedRunError("interrupted while a peer was running")
    if result.exists():
        measured: dict[str, Any] = json.loads(result.read_text())
        if "failed" in measured:
            raise OnDeviceError(measured["failed"])
        return measured
    raise OnDeviceError(ended.failure("its process"))


@contextmanager
def environment(threads: int, as_it_comes: bool) -> Iterator[None]:
    """Let child processes use `threads` threads; `as_it_comes` undoes `prepare`."""
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
    """Variables that were set by the user, and that `prepare` therefore does not choose."""
    return {name: os.environ[name] for name in PREPARED if name in os.environ}


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _prepared() -> dict[str, Any]:
    """The BLAS and the environment of a process of ours, as such a process reports them."""
    script = (
        "import json; from runtime.machine.backend import prepare; "
        "from harness.peers.trainer import environment; "
        "print(json.dumps({'blas': prepare().blas, 'environment': environment()}))"
    )
    prepared: dict[str, Any] = json.loads(run([sys.executable, "-c", script]).output)
    return prepared
