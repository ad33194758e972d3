"""The end of a command: for each error that a user can mend, a message and an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from ondevice.cli.screen import note, said
from runtime.core import signals
from runtime.core.errors import (
    BudgetError,
    InterruptedRunError,
    OnDeviceError,
    StorageError,
    UsageError,
)
from runtime.core.files import TOO_LARGE

DESCRIPTORS = 64  # files, and pipes to other processes, that a command opens at once at most
MORE_FILES = "raise the limit, as with: ulimit -n 1024"

_LONG_WORD = re.compile(r"\S{500,}")  # a name, or a number, that no message needs in full


def outcome_of(command: Callable[[], None]) -> int:
    """Run a command, tell on stderr why it ended, and return its exit code.

    All that it has printed is written out, or the code says that it could not be.
    """
    _open_missing()
    _take_all_text()
    said.forget()
    arrived: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise KeyboardInterrupt

    signals.handle(interrupt)
    try:
        with signals.raised_at_last():
            code = _code_of(command)
    except BaseException as problem:
        if not (arrived or isinstance(problem, KeyboardInterrupt)):
            raise
        code = _interrupted("interrupted")
    if arrived:  # whatever error a library has made of it
        code = InterruptedRunError.exit_code
    try:
        sys.stdout.flush()
    except OSError as problem:
        return _system_error(problem) or code
    return code


def _code_of(command: Callable[[], None]) -> int:
    try:
        _allow_descriptors()
        command()
    except InterruptedRunError as problem:
        return _interrupted(str(problem))
    except OnDeviceError as problem:
        return _said(str(problem), problem.exit_code)
    except MemoryError:
        return _said(
            "the system gives this process no more memory; end other programs, or raise the limit "
            "that it runs under (ulimit -v)",
            BudgetError.exit_code,
        )
    except OSError as problem:
        return _system_error(problem)
    except SystemExit as end:  # after --help and --version
        return int(end.code or 0)
    return 0


def _interrupted(text: str) -> int:
    """Say that a signal ended the command, undisturbed by further ones."""
    signals.ignore()
    return _said(text, InterruptedRunError.exit_code)


def _system_error(problem: OSError) -> int:
    """Tell which request the system refused, and return the exit code."""
    where = "" if problem.filename is None else f": {problem.filename!r:.80}"
    reason = problem.strerror or str(problem)
    if isinstance(problem, BrokenPipeError):
        _discard(sys.stdout)  # nobody reads it any more, as with `| head`
        return 1
    if problem.errno == errno.ENOENT and not _has_working_folder():
        return _said(f"{reason}: the working folder is gone; cd to another", UsageError.exit_code)
    if problem.errno == errno.ENAMETOOLONG:
        return _said(f"{reason}{where}; give a shorter name", UsageError.exit_code)
    if problem.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
        _discard(sys.stdout)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = f": this process may open {soft} (RLIMIT_NOFILE); {MORE_FILES}"
    full = ": the disk is full, or what the output goes to; make room and start again"
    ways = {
        **{errno.EMFILE: files, errno.ENFILE: files, errno.EFBIG: f": {TOO_LARGE}"},
        **{errno.ENOSPC: full, errno.EDQUOT: full},
    }
    return _said(f"{reason}{where}{ways.get(problem.errno or 0, '')}", StorageError.exit_code)


def _open_missing() -> None:
    """Open /dev/null as each of stdin, stdout and stderr that the process was started without.

    Else the first files that it opens would take their place, and be written to.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    names = ("stdin", "stdout", "stderr")
    for number, name in enumerate(names):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w"))


def _take_all_text() -> None:
    """Read and write characters outside the encoding of the terminal or pipe as escapes.

    Bytes that stdin cannot decode are refused where they are used.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _allow_descriptors() -> None:
    """Raise this process's limit on open files to DESCRIPTORS.

    Raises:
        StorageError: the limit cannot be raised so far.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= DESCRIPTORS:
        return
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        raise StorageError(
            f"this process may open {hard} files (RLIMIT_NOFILE), and may need {DESCRIPTORS}; "
            f"{MORE_FILES}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


def _has_working_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _said(text: str, code: int) -> int:
    shown = _LONG_WORD.sub(lambda word: f"{word[0][:100]}...", text)
    try:
        note(f"ondevice: {shown}")
    except OSError:  # stderr's disk is full, or its reader gone: the exit code is left
        _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Send a stream's buffered text to /dev/null, where Python writes it out at the end."""
    with suppress(OSError, ValueError):  # a test's own stream has no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
