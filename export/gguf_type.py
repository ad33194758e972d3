"""What a GGUF file says it is, a model or an adapter, by the first bytes of the file."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFType, GGUFValueType, Keys

_MAGIC = b"GGUF"
_START_BYTES = 4096  # in which every writer known here has put the type


def has_type(path: Path, kind: str) -> bool:
    """Whether a file is a GGUF file of this `general.type`: `GGUFType.MODEL` or `.ADAPTER`."""
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
    return start.startswith(_MAGIC) and _entry(kind) in start


def _entry(kind: str) -> bytes:
    """The bytes of the metadata that say so: a key, the type of its value, and the text."""
    parts = (
        str(Keys.General.TYPE).encode(),
        int(GGUFValueType.STRING).to_bytes(4, "little"),
        len(kind).to_bytes(8, "little"),
        kind.encode(),
    )
    return b"".join(parts)


def is_model(path: Path) -> bool:
    """Whether a file is a GGUF file of a model."""
    return has_type(path, GGUFType.MODEL)


def is_adapter(path: Path) -> bool:
    """Whether a file is a GGUF file of an adapter."""
    return has_type(path, GGUFType.ADAPTER)
