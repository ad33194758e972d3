"""Reads a JSON object from a file of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice.errors import BundleError


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises BundleError if it is missing or holds no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"{path}: missing; a checkpoint folder needs it") from None
    except (ValueError, RecursionError) as e:
        raise BundleError(f"{path}: not JSON: {e}; download it again") from e
    if not isinstance(value, dict):
        raise BundleError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value
