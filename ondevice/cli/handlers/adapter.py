"""Handles `ondevice adapter`: writes a trained adapter as other tools read it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ondevice.cli.handlers.common import configuration, note, set_up
from ondevice.config.adapter import AdapterConfig

_LOADED_BY = {
    "peft": "PeftModel.from_pretrained(model, {output!r})",
    "gguf": "llama-cli -m MODEL.gguf --lora {output}",
    "mlx": "mlx_lm.generate --model {base} --adapter-path {output}",
}


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(AdapterConfig, arguments)
    set_up()
    import numpy as np

    from export.adapters.adapter import Adapter, base_model
    from export.adapters.write import write_adapter
    from ondevice.bundle.store import open_bundle
    from runtime.methods.adapters import Adapters
    from runtime.run.adapter_bundle import bundle_of
    from runtime.run.lora import to_apply

    source = Path(config.run)
    bundle = to_apply(source, open_bundle(config.bundle or bundle_of(source)), note)
    found = Adapters.load(bundle.manifest, source)
    tensors = {name: np.array(value, copy=False) for name, value in found.tensors.items()}
    adapter = Adapter(bundle.manifest, tensors)
    write_adapter(adapter, config.to, Path(config.output), config.force, config.base_model)
    name, revision = base_model(bundle.manifest.provenance)
    base = config.base_model or name
    if arguments.json:
        lora = bundle.manifest.lora.to_json()
        print(
            json.dumps(
                {
                    "output": config.output,
                    "format": config.to,
                    "tensors": len(tensors),
                    "base_model": base,
                    "lora": lora,
                }
            )
        )
    else:
        print(f"{config.output}: {bundle.manifest.lora.describe()}; {len(tensors)} tensors")
        print(f"to use it: {_LOADED_BY[config.to].format(output=config.output, base=base)}")
    if config.base_model is None and revision is None and config.to != "gguf":
        note(
            f"its configuration names the model {name!r}, as the bundle's source calls itself; "
            "--base-model NAME writes the name or path from which the other tool loads it"
        )
