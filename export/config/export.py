"""The options of `ondevice export`, and of `trust` and `slice` for the bundles that it writes."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from runtime.adapters.lora import ALL_LINEAR, LoraSettings
from runtime.config.base import (
    COUNT,
    FILLED,
    INCREASING,
    SEED,
    Check,
    Config,
    Group,
    choice,
    option,
    output_option,
    readable,
    refuse,
    required,
)
from runtime.config.lora import ALPHA, RANK, TARGETS, layer_names, targets_of
from runtime.config.shared import DEVICES, STORED, BudgetOptions, DataOptions, bundle_field
from runtime.core.stripes import MAX_SLICES

EIGHT_BIT = "k_proj,v_proj"
STORAGE = ("bfloat16", "float16", "float32")
BITS = (4, 8, 16, 32)  # per weight: integers of the first two, floats of the others
GROUP_SIZES = (32, 64, 128)
QUANTIZING = (
    *("bits", "embedding_bits", "group_size", "eight_bit", "calibrate"),
    "calibration_tokens",
)
"""Options that have no effect where nothing is quantized."""
SLICES = Check(lambda count: 2 <= count <= MAX_SLICES, f"a whole number from 2 to {MAX_SLICES}")
_NAMES = readable(layer_names, "names of layers such as k_proj,v_proj, or none")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(DataOptions, BudgetOptions):
    """The options of `ondevice export`, which converts a checkpoint to a bundle."""

    positional: ClassVar[str] = "source"

    source: str = required(
        "checkpoint: a Hugging Face folder or model id, a .gguf file, or random:PRESET for random "
        "weights",
        "SOURCE",
    )
    output: str = output_option(MISSING, "bundle directory to write", "BUNDLE")
    force: bool = option(False, "replace a bundle that is there already")
    unverified: bool = option(
        False, "export a model type whose results have not been compared with transformers'"
    )
    seed: int = option(0, "seed of the weights of random:PRESET; else unused", SEED)
    bits: int | None = choice(
        None,
        "bits per weight of the linear layers: quantized (4, 8) or floats (16, 32); without it, "
        "a quantized checkpoint keeps its values, and another gets 4",
        *BITS,
        group=Group.QUANTIZATION,
    )
    embedding_bits: int | None = choice(
        None,
        "bits per weight of the embedding and the LM head (default: those of --bits)",
        *BITS,
        group=Group.QUANTIZATION,
    )
    group_size: int = choice(
        64,
        "weights that share one scale, in matrices that the export quantizes",
        *GROUP_SIZES,
        group=Group.QUANTIZATION,
    )
    eight_bit: str = option(
        EIGHT_BIT,
        "linear layers that get 8 bits where others get 4, by name; or none",
        _NAMES,
        Group.QUANTIZATION,
        metavar="NAMES",
    )
    calibrate: str | None = option(
        None,
        "text or conversations to whose inputs the quantized layers are fitted (GPTQ): your "
        "training data is the best choice; formats as for `ondevice train --data`",
        FILLED,
        Group.QUANTIZATION,
        metavar="DATA",
    )
    calibration_tokens: int = option(
        8192, "tokens of the data that are used to calibrate", COUNT, Group.QUANTIZATION
    )
    quality: bool = option(
        True,
        "measure how far the bundle's predictions are from the checkpoint's (never done for "
        "random:PRESET)",
        group=Group.QUANTIZATION,
    )
    graphs: bool = option(
        True,
        "write the graphs into the bundle; without them they are traced where the bundle is used",
    )
    trainable: str = choice(
        "lora",
        "what `ondevice train` trains by default: adapters, or all parameters (full), which are "
        "then stored as floats",
        *STORED,
        hints={"prefix": "a prefix needs no export of its own; ondevice train takes it"},
    )
    storage: str = choice(
        "bfloat16",
        "with --trainable full: the type in which all matrices are stored and trained",
        *STORAGE,
        group=Group.QUANTIZATION,
    )
    lora_rank: int = option(
        8, "rank of adapters where `ondevice train` gives no other", RANK, Group.LORA
    )
    lora_alpha: float = option(
        16.0,
        "alpha of adapters, whose output is scaled by alpha / rank, likewise",
        ALPHA,
        Group.LORA,
    )
    lora_targets: str = option(
        ALL_LINEAR,
        "linear layers to adapt, likewise: all-linear, or their names, such as q_proj,v_proj",
        TARGETS,
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

    def __post_init__(self) -> None:
        super().__post_init__()
        floats = (16, 32)
        problems = [
            f"{name} has no effect: {reason}"
            for name, useless, reason in (
                ("eight_bit", self.bits in (8, *floats), f"every linear layer has {self.bits}"),
                (
                    "group_size",
                    self.bits in floats and self.head_bits in floats,
                    "floats have no groups",
                ),
                ("calibration_tokens", self.calibrate is None, "it needs calibrate"),
                ("storage", not self.is_full, "it needs trainable full"),
                *((name, self.is_full, "trainable full stores floats") for name in QUANTIZING),
            )
            if useless and self.was_given(name)
        ]
        refuse(type(self), problems)

    @property
    def is_full(self) -> bool:
        """Whether all parameters are to be trained."""
        return self.trainable == "full"

    @property
    def head_bits(self) -> int | None:
        """The bits of the embedding and the LM head; None to copy a quantized source's integers."""
        return self.bits if self.embedding_bits is None else self.embedding_bits

    @property
    def eight_bit_names(self) -> tuple[str, ...]:
        """The names of linear layers that get 8 bits."""
        return () if self.eight_bit == "none" else layer_names(self.eight_bit)

    @property
    def lora(self) -> LoraSettings:
        """The adapters that training uses where it is given no others."""
        return LoraSettings(self.lora_rank, self.lora_alpha, targets_of(self.lora_targets))


@dataclass(frozen=True, kw_only=True)
class TrustConfig(Config):
    """The options of `ondevice trust`, which lets a bundle's own graphs run."""

    bundle: str = bundle_field()
    yes: bool = option(False, "do not ask")


@dataclass(frozen=True, kw_only=True)
class SliceConfig(Config):
    """The options of `ondevice slice`, which cuts a bundle for machines that cannot hold it."""

    bundle: str = bundle_field()
    count: int = option(2, "how many slices, one for each machine", SLICES)
    output: str = output_option(MISSING, "directory of the slices 1-of-N to N-of-N", "DIR")
    force: bool = option(False, "replace slices that are there")
