"""Adapters from Python, written as other tools read them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from export.config.fuse import AdapterConfig
from ondevice.api.process import hearing, prepare, refuse_others
from runtime.adapters.lora import LoraSettings
from runtime.core.notes import Note


class AdapterResult(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter, written as another tool reads it.

    output: the folder, or for gguf the file. format: "peft", "gguf" or "mlx".
    tensors: how many there are. base_model: the model's name in its configuration.
    """

    output: str
    format: str
    tensors: int
    base_model: str
    lora: LoraSettings


def adapter(config: AdapterConfig, *, on_note: Note | None = None) -> AdapterResult:
    """Write a trained adapter for PEFT, llama.cpp or mlx-lm, as `ondevice adapter` does.

    on_note(text) receives lines for people.

    Raises:
        UsageError: the output exists, or the format cannot hold the adapter.
        BundleError: the bundle or the adapter cannot be used.
        StorageError: it cannot be written.
    """
    refuse_others(config, AdapterConfig)
    prepare()
    return convert(config, hearing(on_note))


def convert(config: AdapterConfig, note: Note) -> AdapterResult:
    """Write the adapter that a configuration names, in a process that is set up for it."""
    import numpy as np

    from export.adapters.adapter import Adapter, base_model
    from export.adapters.write import write_adapter
    from runtime.bundle.store import open_bundle
    from runtime.methods.adapters import Adapters
    from runtime.run.folder import bundle_of
    from runtime.run.lora import refuse_prefix, to_apply

    source = Path(config.run)
    bundle = to_apply(source, open_bundle(config.bundle or bundle_of(source)), note)
    refuse_prefix(bundle.manifest.lora, source, "other tools read LoRA adapters")
    adapters = Adapters.load(bundle.manifest, source)
    tensors = {name: np.array(value, copy=False) for name, value in adapters.tensors.items()}
    output = Path(config.output)
    converted = Adapter(bundle.manifest, tensors)
    write_adapter(converted, config.to, output, config.force, config.base_model)
    name, revision = base_model(bundle.manifest.provenance)
    if config.base_model is None and revision is None and config.to != "gguf":
        note(
            f"its configuration names the model {name!r}, as the bundle's source calls itself; "
            "--base-model NAME writes the name or path from which the other tool loads it"
        )
    return AdapterResult(
        output=str(output),
        format=config.to,
        tensors=len(tensors),
        base_model=config.base_model or name,
        lora=bundle.manifest.lora,
    )
