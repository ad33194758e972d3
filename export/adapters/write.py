"""The formats in which an adapter can be written, and who writes each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from export.adapters.adapter import Adapter
from export.adapters.gguf import write_gguf
from export.adapters.mlx_lm import write_mlx
from export.adapters.peft import write_peft
from runtime.core.paths import text_path

_WRITERS: dict[str, Callable[[Adapter, Path, bool, str | None], None]] = {
    "peft": write_peft,
    "gguf": write_gguf,
    "mlx": write_mlx,
}


def write_adapter(
    adapter: Adapter, form: str, output: Path, force: bool = False, base: str | None = None
) -> None:
    """Write an adapter for another tool, whole or not at all.

    Args:
        adapter: the adapter and its model.
        form: "peft", "gguf" or "mlx".
        output: the folder, or for gguf the file, to write.
        force: whether one that is there is replaced.
        base: the name of the model in the other tool; without it that of the bundle's source.

    Raises:
        UsageError: the output exists, or the format cannot hold this adapter.
        StorageError: it cannot be written.
    """
    _WRITERS[form](adapter, text_path(output), force, base)
