"""Errors a user can cause or repair, each with its exit code; users never see a traceback.

A message says what is wrong, the numbers, and the way out.
"""

from __future__ import annotations


class OnDeviceError(Exception):
    """Base of all errors shown to the user without a traceback."""

    exit_code = 1


class UsageError(OnDeviceError):
    """A flag, a configuration key or a combination of them is wrong."""

    exit_code = 2


class BudgetError(OnDeviceError):
    """The memory budget cannot hold the run, or a run passed it."""

    exit_code = 3


class BundleError(OnDeviceError):
    """A bundle, checkpoint or adapter is truncated, altered, inconsistent or unsupported."""

    exit_code = 4


class DataError(OnDeviceError):
    """The training or evaluation data cannot be used."""

    exit_code = 4


class StorageError(OnDeviceError):
    """The disk is full or a file cannot be written; what was there before is intact."""

    exit_code = 5


class DivergedError(OnDeviceError):
    """Training has left the finite numbers; the last save is intact."""


class InterruptedRunError(OnDeviceError):
    """Ctrl-C or SIGTERM arrived; state was saved where there was any."""

    exit_code = 130
