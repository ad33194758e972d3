"""Options of LoRA adapters, for commands that train them.

The adapter that training starts from decides the others, else the bundle's default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runtime.adapters.lora import ALL_LAYERS, ALL_LINEAR, MOST_ALPHA, MOST_RANK
from runtime.config.base import COUNT, Check, Config, Group, between, option, readable


def layer_names(text: str) -> tuple[str, ...]:
    """The names in "q_proj,v_proj". Raises ValueError if one is no name."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(map(str.isidentifier, names)):
        raise ValueError(text)
    return names


def targets_of(text: str) -> Literal["all-linear"] | tuple[str, ...]:
    """The value of `LoraSettings.targets` for "all-linear" or "q_proj,v_proj"."""
    return ALL_LINEAR if text == ALL_LINEAR else layer_names(text)


SETTINGS = ("rank", "alpha", "targets", "layers", "rslora")  # of `LoraSettings`


def option_of(setting: str) -> str:
    """The name of the option for a field of `LoraSettings`."""
    return setting if setting == "rslora" else f"lora_{setting}"


TARGETS = readable(targets_of, "all-linear, or names of layers such as q_proj,v_proj")
RANK = Check(lambda rank: 1 <= rank <= MOST_RANK, f"1 to {MOST_RANK}")
ALPHA = between(1e-3, MOST_ALPHA, "usual is once or twice the rank")
_LAST = Check(
    lambda count: count == ALL_LAYERS or COUNT.allows(count),
    f"1 or more, or {ALL_LAYERS} for all",
)


@dataclass(frozen=True, kw_only=True)
class LoraOptions(Config):
    """Options of adapters, for any method; None if not given."""

    lora_rank: int | None = option(
        None,
        "rank of the adapters (default of this and the next four: that of the adapter to start "
        "from, else the bundle's)",
        RANK,
        Group.LORA,
    )
    lora_alpha: float | None = option(
        None,
        "alpha of the adapters, whose output is scaled by alpha / rank",
        ALPHA,
        Group.LORA,
    )
    lora_targets: str | None = option(
        None,
        "linear layers to adapt: all-linear, or their names, such as q_proj,v_proj; by name also "
        "embed_tokens,lm_head",
        TARGETS,
        Group.LORA,
        metavar="NAMES",
    )
    lora_layers: int | None = option(
        None,
        "how many transformer layers to adapt, counted from the last one, as mlx-lm's "
        "--num-layers; -1 for all",
        _LAST,
        Group.LORA,
    )
    rslora: bool | None = option(
        None,
        "scale the adapters' output by alpha / sqrt(rank) instead (rank stabilization)",
        group=Group.LORA,
    )

    @property
    def given_lora(self) -> dict[str, Any]:
        """The fields of `LoraSettings` that were given."""
        values = {name: getattr(self, option_of(name)) for name in SETTINGS}
        if self.lora_targets is not None:
            values["targets"] = targets_of(self.lora_targets)
        return {name: value for name, value in values.items() if value is not None}
