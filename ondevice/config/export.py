"""The options of `ondevice export`, which converts a checkpoint to a bundle."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from ondevice.config.base import (
    ABOVE_ZERO,
    COUNT,
    INCREASING,
    NOT_NEGATIVE,
    Check,
    Config,
    Group,
    choice,
    option,
    output_option,
    required,
)
from ondevice.config.shared import DEVICES
from ondevice.operations.tensors import FLOAT_BITS

_LAYERS = Check(
    lambda text: text == "all-linear" or all(n.strip().isidentifier() for n in text.split(",")),
    "all-linear, or names of layers such as q_proj,v_proj",
)


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """The options of `ondevice export`, which converts a checkpoint to a bundle."""

    positional: ClassVar[str] = "source"

    source: str = required(
        "checkpoint: a Hugging Face folder or model id, a .gguf file, or random:PRESET for random "
        "weights",
        "SOURCE",
    )
    output: str = output_option(MISSING, "bundle directory to write", "BUNDLE")
    force: bool = option(False, "replace a bundle that is there already")
    seed: int = option(0, "seed of the weights of random:PRESET; else unused", NOT_NEGATIVE)
    bits: int = choice(
        4,
        "bits per weight of the linear layers; 16 and 32 are floating point, 16 the source's own "
        "16-bit type if it has one and else bfloat16",
        4,
        8,
        16,
        32,
        group=Group.QUANTIZATION,
    )
    group_size: int = choice(
        64, "weights that share one scale", 32, 64, 128, group=Group.QUANTIZATION
    )
    embedding_bits: int = choice(
        4,
        "bits per weight of the embedding and the LM head; with --bits 16 or 32 at least these",
        4,
        8,
        16,
        32,
        group=Group.QUANTIZATION,
    )
    lora_rank: int = option(8, "rank of the adapters", COUNT, Group.LORA)
    lora_alpha: float = option(
        16.0,
        "alpha of the adapters, whose output is scaled by alpha / rank",
        ABOVE_ZERO,
        Group.LORA,
    )
    lora_targets: str = option(
        "all-linear",
        "linear layers to adapt: all-linear, or their names, such as q_proj,v_proj",
        _LAYERS,
        Group.LORA,
        metavar="NAMES",
    )
    seq_lens: tuple[int, ...] = option(
        (64, 128, 256, 512, 1024),
        "sequence buckets in tokens: the lengths to which batches are padded",
        INCREASING,
        Group.GRAPHS,
    )
    device: str = choice("auto", "device that the graphs are for", *DEVICES, group=Group.GRAPHS)

    @property
    def least_embedding_bits(self) -> int:
        """The bits of the embedding: a model in floating point has no quantized embedding."""
        floating = self.bits if self.bits in FLOAT_BITS.values() else 0
        return max(floating, self.embedding_bits)

    @property
    def lora_target_names(self) -> tuple[str, ...] | None:
        """The layer names to adapt, or None for every linear layer."""
        if self.lora_targets == "all-linear":
            return None
        return tuple(name.strip() for name in self.lora_targets.split(","))
