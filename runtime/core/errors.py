"""Errors that a user can cause or repair, each with its exit code and shown without a traceback.

A message says what is wrong, the numbers, and what to do.
"""

from __future__ import annotations


class OnDeviceError(Exception):
    """Base of all errors shown to the user without a traceback."""

    exit_code = 1


class UsageError(OnDeviceError):
    """An argument or a configuration key is wrong, or a combination of them."""

    exit_code = 2


class BudgetError(OnDeviceError):
    """The memory budget is too small for the run, or the run exceeded it."""

    exit_code = 3


class BundleError(OnDeviceError):
    """A bundle, checkpoint or adapter is truncated, altered, inconsistent or unsupported."""

    exit_code = 4


class DataError(OnDeviceError):
    """The training or evaluation data cannot be used."""

    exit_code = 4


class StorageError(OnDeviceError):
    """The disk is full or a file cannot be written; its old content is intact."""

    exit_code = 5


class DivergedError(OnDeviceError):
    """The loss or an update is no longer finite; the last saved state is intact."""


class InterruptedRunError(OnDeviceError):
    """Ctrl-C, SIGTERM or SIGHUP arrived; the state of a training run was saved."""

    exit_code = 130


class WorkerError(OnDeviceError):
    """Another process of the run has failed or is gone; all end with its exit code.

    `differs` says that the processes are all there, and compute differently.
    """

    def __init__(self, text: str, exit_code: int = 1, differs: bool = False) -> None:
        super().__init__(text)
        self.exit_code, self.differs = exit_code, differs
