"""One configuration, one fresh process, one JSON: what every comparison and table is made of.

A measured process shares nothing with its neighbours but the machine. Invariant: exactly one
signal of ours reaches it for each that reaches us (it runs in a process group of its own, so a
terminal's Ctrl-C does not come twice), and we outlive it: the first asks it to save and end, the
second to end at once, the third kills it.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from ondevice import __version__
from ondevice.errors import (
    BudgetError,
    BundleError,
    DivergedError,
    InterruptedRunError,
    OnDeviceError,
    StorageError,
    UsageError,
)

ROOT = Path(__file__).resolve().parents[2]
KEPT_CHARS = 1 << 14  # of the end of a process's stderr
PATHS = ("bundle", "data", "eval_data")
_PREFIX = "ondevice: "  # of every error that the command line reports
_ERRORS: dict[int, type[OnDeviceError]] = {
    kind.exit_code: kind
    for kind in (UsageError, BudgetError, BundleError, StorageError, DivergedError)
}


@dataclass(frozen=True)
class _Ended:
    """How a process ended: its exit code (negative: a signal), its output, its last words."""

    code: int
    output: str
    said: str
    interrupted: bool


def ondevice(*arguments: str, module: str = "ondevice") -> str:
    """Run a command of the command line in a fresh process, stderr on ours; returns its stdout.

    `module` may be another that is run with `-m` and reports its errors in the same way.

    Raises:
        OnDeviceError: what the process reported, with its text and exit code.
        InterruptedRunError: SIGINT or SIGTERM arrived; the process has saved and ended.
    """
    ended = _run([sys.executable, "-P", "-m", module, *arguments])
    name = f"{module} {arguments[0]}"
    message = _message(ended.said)
    if ended.interrupted or ended.code == InterruptedRunError.exit_code:
        raise InterruptedRunError(message or "interrupted before the process had begun")
    if ended.code == 0:
        return ended.output
    if ended.code < 0:
        raise OnDeviceError(
            f"the process of `{name}` was ended by "
            f"{signal.Signals(-ended.code).name}; free memory if it was the system's doing, and "
            "run the same command again"
        )
    if not message:
        last = ended.said.strip().splitlines()[-1:] or ["it said nothing"]
        raise OnDeviceError(f"the process of `{name}` ended with code {ended.code}: {last[0]}")
    raise _ERRORS.get(ended.code, OnDeviceError)(message)


def measure(settings: Mapping[str, object], run: Path) -> dict[str, Any]:
    """Train in `run` with `settings` (fields of TrainConfig) in a fresh process; its summary.

    A run that is there already is gone on with, and not run again where it is finished.

    Raises:
        UsageError: `run` holds a run of other settings.
        OnDeviceError: as `ondevice`.
    """
    summary = run / "summary.json"
    if (run / "config.toml").exists():
        _check_same(settings, run)
        if not summary.exists():
            ondevice("train", "--resume", str(run), "--json")
    else:
        bundle, *flags = (
            str(value) if name == "bundle" else _flag(name, value)
            for name, value in sorted(settings.items(), key=lambda item: item[0] != "bundle")
        )
        ondevice("train", bundle, *flags, f"--output={run}", "--json")
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def provenance() -> dict[str, Any]:
    """The version that measured, and its commit where it is a checkout ("-dirty": and edits)."""
    return {"version": __version__, "commit": _commit()}


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        return done.stdout.strip() if done.returncode == 0 else ""

    if shutil.which("git") is None or git("rev-parse", "--show-toplevel") != str(ROOT):
        return None  # installed, or inside a checkout of something else
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def _check_same(settings: Mapping[str, object], run: Path) -> None:
    there = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    odd = []
    for name, value in settings.items():
        before = there.get(name)
        if name in PATHS and not str(value).startswith("random:"):
            value = str(Path(str(value)).resolve())
        if before != value:
            odd.append(f"{name} {before!r} (now {value!r})")
    if odd:
        raise UsageError(
            f"{run} holds a run of other settings: {', '.join(odd)}; remove it or choose another "
            "place"
        )


def _message(said: str) -> str:
    """The error at the end of a process's stderr; empty where it ended without one of ours."""
    lines = [line.rpartition("\r")[2] for line in said.replace("\r\n", "\n").split("\n")]
    starts = [
        index
        for index, line in enumerate(lines)
        if line.startswith(_PREFIX) and not line.startswith(f"{_PREFIX}warning:")
    ]
    if not starts:
        return ""
    return "\n".join(lines[starts[-1] :]).removeprefix(_PREFIX).strip()


def _run(command: list[str]) -> _Ended:
    """Run to the end, passing stderr through (progress bars too, where ours is a terminal)."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    terminal = sys.stderr.isatty()
    reader, writer = os.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stderr))
        modes = termios.tcgetattr(writer)
        modes[1] &= ~termios.OPOST  # ours translates line ends
        termios.tcsetattr(writer, termios.TCSANOW, modes)
    with tempfile.TemporaryFile() as output, os.fdopen(reader, "rb", buffering=0) as heard:
        child = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=writer,
            process_group=0,
        )
        os.close(writer)
        said, interrupted = _follow(child, heard.fileno())
        output.seek(0)
        text = output.read().decode(errors="replace")
    return _Ended(child.returncode, text, said, interrupted)


def _follow(child: subprocess.Popen[bytes], reader: int) -> tuple[str, bool]:
    """Pass a process's stderr on until it ends; the last of it, and whether we were interrupted."""
    signals = chain((signal.SIGTERM, signal.SIGINT), repeat(signal.SIGKILL))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    said, interrupted = "", False
    try:
        while True:
            try:
                chunk = _heard(reader)
                if not chunk:
                    child.wait()
                    return said, interrupted
                text = decoder.decode(chunk)
                said = (said + text)[-KEPT_CHARS:]
                sys.stderr.write(text)
                sys.stderr.flush()
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(next(signals))
    finally:
        if child.poll() is None:  # something of ours failed: let it save all the same
            child.terminate()
            child.wait()


def _heard(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 12)
    except OSError as problem:
        if problem.errno != errno.EIO:  # how a pseudo-terminal says that its other end is closed
            raise
        return b""
