"""Setting up the caller's process, and handing on notes and progress."""

from __future__ import annotations

import os
import sys
import threading
import warnings

from runtime.core.errors import UsageError
from runtime.core.notes import Note, Said, warned_of

_computed: set[int] = set()  # of this process and its ancestors, those that had used MLX at a fork


def hearing(on_note: Note | None) -> Note:
    """The receiver of a call's notes, which go to the caller's `on_note`, each warning once.

    Warnings also become Python's own (`RuntimeWarning`), so that they are seen where nobody reads
    notes.
    """

    said = Said()

    def note(text: str) -> None:
        if not said.is_news(text):
            return
        if warned := warned_of(text):
            warnings.warn(warned, RuntimeWarning, stacklevel=2)
        if on_note is not None:
            on_note(text)

    return note


def refuse_others(config: object, kind: type) -> None:
    """Raise UsageError if a function's `config` is not of its command's `kind`."""
    if not isinstance(config, kind):
        raise UsageError(
            f"config is of type {type(config).__name__}; it must be an ondevice.{kind.__name__}"
        )


def _look_at_mlx() -> None:
    """Before a fork: MLX starts threads when it first computes, and no fork has them."""
    if (mlx := sys.modules.get("mlx.core")) and mlx.get_peak_memory():
        _computed.add(os.getpid())


def refuse_threads_and_forks() -> None:
    """Raise UsageError outside of the main thread, and where MLX's threads were left behind."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "ondevice computes in the main thread alone: MLX's graphs belong to the streams of the "
            "thread that loads them, and signals to the main one; use a process of its own"
        )
    if _computed - {os.getpid()}:
        raise UsageError(
            "this process was forked from one in which MLX had computed, and has none of its "
            'threads; start it by multiprocessing.get_context("spawn"), or as a command'
        )


def prepare(keep_heap: bool = True) -> str:
    """Set the process up for MLX; call it before `import mlx` where you import MLX yourself.

    Every function of this package calls it first. On Linux it loads an optimized BLAS in place of
    the slow one in MLX's wheel, and sets how the C library's heap keeps freed memory; `keep_heap`
    is for training, which allocates the same sizes again and again. Returns the name of the BLAS.

    Raises:
        UsageError: this is not the main thread, or a fork of a process that has used MLX.

    Warns:
        RuntimeWarning: there is no optimized BLAS, or MLX was imported before.
    """
    refuse_threads_and_forks()
    from runtime.machine.backend import prepare as set_up

    prepared = set_up(keep_heap)
    if prepared.warning:
        warnings.warn(prepared.warning, RuntimeWarning, stacklevel=3)
    return prepared.blas


os.register_at_fork(before=_look_at_mlx)
