"""Handles `ondevice adapter`: writes a trained adapter as other tools read it."""

from __future__ import annotations

import argparse
import json

from export.config.adapter import AdapterConfig
from ondevice.cli.handlers.common import configuration, note, set_up

_LOADED_BY = {
    "peft": "PeftModel.from_pretrained(model, {output!r})",
    "gguf": "llama-cli -m MODEL.gguf --lora {output}",
    "mlx": "mlx_lm.generate --model {base} --adapter-path {output}",
}


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(AdapterConfig, arguments)
    set_up()
    from ondevice.api.converting import convert
    from ondevice.api.process import Said

    found = convert(config, Said(note, warns=False))
    if arguments.json:
        facts = {
            "output": config.output,
            "format": found.format,
            "tensors": found.tensors,
            "base_model": found.base_model,
            "lora": found.lora.to_json(),
        }
        print(json.dumps(facts))
    else:
        print(f"{config.output}: {found.lora.describe()}; {found.tensors} tensors")
        used = _LOADED_BY[found.format].format(output=config.output, base=found.base_model)
        print(f"to use it: {used}")
