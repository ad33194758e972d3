"""Writes an adapter for PEFT, which transformers, vLLM and others load."""

from __future__ import annotations

from pathlib import Path

from export.adapters.adapter import Adapter, base_model
from export.adapters.folder import write_folder
from runtime.adapters import peft


def write_peft(adapter: Adapter, output: Path, force: bool, base: str | None) -> None:
    """Write a folder for `PeftModel.from_pretrained`.

    `base` is what transformers loads the model from; without it the name of the bundle's source.

    Raises:
        UsageError: the folder exists, or holds other files.
        StorageError: it cannot be written.
    """
    name, revision = base_model(adapter.manifest.provenance) if base is None else (base, None)
    count = len(adapter.manifest.layers)
    config = peft.config_of(
        adapter.manifest.lora,
        adapter.paths,
        None if len(adapter.layers) == count else adapter.layers,
        name,
        revision,
        adapter.sees,
    )
    tensors = {peft.stored_name(own, adapter.sees): v.T for own, v in adapter.tensors.items()}
    write_folder(output, force, (peft.WEIGHTS, tensors, "pt"), (peft.CONFIG, config))
