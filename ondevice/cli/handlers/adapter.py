"""Handles `ondevice adapter`: writes a trained adapter as other tools read it."""

from __future__ import annotations

import argparse

from export.config.fuse import AdapterConfig
from ondevice.cli.handlers.common import configuration, note, print_json, set_up

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

    found = convert(config, note)
    if arguments.json:
        print_json(found)
    else:
        print(f"{config.output}: {found.lora.describe()}; {found.tensors} tensors")
        used = _LOADED_BY[found.format].format(output=config.output, base=found.base_model)
        print(f"to use it: {used}")
