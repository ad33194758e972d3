"""Reads a JSON object from a file of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.core.documents import from_json
from runtime.core.errors import BundleError
from runtime.core.files import read_small

_MOST_BYTES = 64 << 20  # far above any index of tensors


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises BundleError if it is missing, holds no object, or has more than 64 MiB.
    """
    try:
        value = from_json(read_small(path, _MOST_BYTES, "a description of a checkpoint"))
    except FileNotFoundError:
        raise BundleError(f"{path}: missing; a checkpoint folder needs it") from None
    except OSError as e:
        raise BundleError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise BundleError(f"{path}: not JSON: {e}; download it again") from e
    if not isinstance(value, dict):
        raise BundleError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value
