"""The options of `ondevice generate`, which continues a prompt."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from ondevice.config.base import COUNT, Config, option
from ondevice.config.shared import adapter_field, bundle_field, device_field


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Config):
    """The options of `ondevice generate`, which continues a prompt."""

    bundle: str = bundle_field()
    prompt: str = option(MISSING, "text to continue")
    adapter: str | None = adapter_field(
        "adapter to apply: a run, an adapter folder (ours, PEFT's or mlx-lm's), or its "
        ".safetensors file "
        "(default: the base model)"
    )
    max_tokens: int = option(64, "tokens to generate at most", COUNT)
    chat: bool = option(
        False, "take the prompt as a user's message and answer it, by the model's chat template"
    )
    device: str = device_field()
