"""Running a fresh process to its end, for its output, its last errors and its exit code.

Its stderr is passed on to ours as it comes, but for the last words of one that was interrupted:
whoever runs it says how to go on. Invariant: the process receives exactly one signal for
each that we receive, and we outlive it. It runs in a process group of its own, so that a
terminal's Ctrl-C does not reach it twice; the first signal asks it to save and end, the second to
end at once, the third kills it.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from runtime.core.errors import InterruptedRunError
from runtime.core.signals import surviving_hangup

ROOT = Path(__file__).resolve().parents[2]
KEPT_CHARS = 1 << 14  # of the end of a process's stderr
ERROR, WARNING = "ondevice: ", "ondevice: warning: "  # how a line of either begins
_LAST_WORDS = re.compile(rf"(?<=[\n\r]){ERROR}(?!warning: )")


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: a signal), and its output."""

    code: int
    output: str
    stderr: str
    interrupted: bool

    def failure(self, name: str) -> str:
        """Why a process that failed without a message of its own did so."""
        if self.code < 0:
            return (
                f"{name} was ended by {signal.Signals(-self.code).name}; free memory if it was the "
                "system's doing, and run the same command again"
            )
        last = self.stderr.strip().splitlines()[-1:] or ["it wrote nothing"]
        return f"{name} ended with code {self.code}: {last[0]}"


def run(command: Sequence[str]) -> Ended:
    """Run a command to its end; where our stderr is a terminal, it writes to one too."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    terminal = sys.stderr.isatty()
    reader, writer = os.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stderr))
        modes = termios.tcgetattr(writer)
        modes[1] &= ~termios.OPOST  # our own terminal translates line ends
        termios.tcsetattr(writer, termios.TCSANOW, modes)
    with tempfile.TemporaryFile() as output, os.fdopen(reader, "rb", buffering=0) as stderr:
        child = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=writer,
            process_group=0,
        )
        os.close(writer)
        text, interrupted = _follow(child, stderr.fileno())
        output.seek(0)
        written = output.read().decode(errors="replace")
    return Ended(child.returncode, written, text, interrupted)


def _follow(child: subprocess.Popen[bytes], reader: int) -> tuple[str, bool]:
    """Pass stderr on until the process ends; the end of it, and whether we were interrupted."""
    signals = chain(repeat(signal.SIGTERM, 2), repeat(signal.SIGKILL))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    kept, interrupted, before, last_words = "", False, "\n", ""
    try:
        while True:
            try:
                chunk = _read(reader)
                if not chunk:
                    if child.wait() != InterruptedRunError.exit_code:
                        _pass_on(last_words)
                    return kept, interrupted
                text = decoder.decode(chunk)
                kept = (kept + text)[-KEPT_CHARS:]
                passed, last_words = parted(before, last_words + text)
                before = (before + passed)[-1]
                _pass_on(passed)
            except KeyboardInterrupt:
                interrupted = True
                child.send_signal(next(signals))
    finally:
        if child.poll() is None:  # an error of ours: the process is still asked to save
            child.terminate()
            child.wait()


def parted(before: str, text: str) -> tuple[str, str]:
    """Part a process's stderr into the text to pass on, and the error that follows, if one does.

    `before` is the character before `text`.
    """
    both = before + text
    line = max(both.rfind("\n"), both.rfind("\r")) + 1  # where the last one begins, if it does
    end = line if line and WARNING.startswith(both[line:]) else len(both)
    error = _LAST_WORDS.search(both, 0, end)
    cut = end if error is None else error.start()
    return both[1:cut], both[cut:]


def _pass_on(text: str) -> None:
    with surviving_hangup():
        sys.stderr.write(text)
        sys.stderr.flush()


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 12)
    except OSError as problem:
        if problem.errno != errno.EIO:  # EIO: the other end of a pseudo-terminal is closed
            raise
        return b""
