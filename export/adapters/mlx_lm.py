"""Writes an adapter for mlx-lm."""

from __future__ import annotations

from pathlib import Path

from export.adapters.adapter import Adapter, base_model
from export.adapters.folder import write_folder
from runtime.adapters import mlx_lm
from runtime.adapters.names import outer_name

_INSIDE = "language_model."  # where mlx-lm has the language model of one that also sees


def write_mlx(adapter: Adapter, output: Path, force: bool, base: str | None) -> None:
    """Write a folder for `mlx_lm.load(model, adapter_path=...)`.

    `base` is what mlx-lm loads the model from; without it the name of the bundle's source.

    Raises:
        UsageError: the folder exists, or holds other files.
        StorageError: it cannot be written.
    """
    name = base_model(adapter.manifest.provenance)[0] if base is None else base
    config = mlx_lm.config_of(adapter.manifest.lora, len(adapter.layers), adapter.paths)
    tensors = {
        outer_name(own, _INSIDE) if adapter.sees else own: value
        for own, value in adapter.tensors.items()
    }
    weights = (mlx_lm.WEIGHTS, tensors, "mlx")
    write_folder(output, force, weights, (mlx_lm.CONFIG, {"model": name, **config}))
