"""Handles `ondevice adapter`: writes a trained adapter as other tools read it."""

from __future__ import annotations

import argparse
from shlex import quote

from export.config.fuse import AdapterConfig
from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.screen import note, out

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

    result = convert(config, note)
    if arguments.json:
        print_json(result)
    else:
        out(f"{config.output}: {result.lora.describe()}; {result.tensors} tensors")
        shell = result.format != "peft"  # which is loaded in Python
        output = quote(str(config.output)) if shell else config.output
        base = quote(str(result.base_model))
        used = _LOADED_BY[result.format].format(output=output, base=base)
        out(f"to use it: {used}")
