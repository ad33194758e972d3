"""The errors of the Python API, which are those of the command line."""

from runtime.core.errors import (
    BudgetError,
    BundleError,
    DataError,
    DivergedError,
    InterruptedRunError,
    OnDeviceError,
    StorageError,
    UsageError,
)

__all__ = [
    "BudgetError",
    "BundleError",
    "DataError",
    "DivergedError",
    "InterruptedRunError",
    "OnDeviceError",
    "StorageError",
    "UsageError",
]
