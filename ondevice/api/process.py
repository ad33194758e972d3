"""Setting up the caller's process, and handing on notes and progress."""

from __future__ import annotations

import threading
import warnings

from runtime.core.errors import UsageError
from runtime.core.notes import Note, Said, warned_of


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


def refuse_threads() -> None:
    """Raise UsageError outside of the main thread, where MLX's graphs could not run."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "ondevice computes in the main thread alone: MLX's graphs belong to the streams of the "
            "thread that loads them, and signals to the main one; use a process of its own"
        )


def prepare(keep_heap: bool = True) -> str:
    """Set the process up for MLX; call it before `import mlx` where you import MLX yourself.

    Every function of this package calls it first. On Linux it loads an optimized BLAS in place of
    the slow one in MLX's wheel, and sets how the C library's heap keeps freed memory; `keep_heap`
    is for training, which allocates the same sizes again and again. Returns the name of the BLAS.

    Raises:
        UsageError: this is not the main thread.

    Warns:
        RuntimeWarning: there is no optimized BLAS, or MLX was imported before.
    """
    refuse_threads()
    from runtime.machine.backend import prepare as set_up

    prepared = set_up(keep_heap)
    if prepared.warning:
        warnings.warn(prepared.warning, RuntimeWarning, stacklevel=3)
    return prepared.blas
