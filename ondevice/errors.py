"""The errors of the Python API, which are those of the command line."""

from runtime.core.errors import BudgetError as BudgetError
from runtime.core.errors import BundleError as BundleError
from runtime.core.errors import DataError as DataError
from runtime.core.errors import DivergedError as DivergedError
from runtime.core.errors import InterruptedRunError as InterruptedRunError
from runtime.core.errors import OnDeviceError as OnDeviceError
from runtime.core.errors import StorageError as StorageError
from runtime.core.errors import UsageError as UsageError
