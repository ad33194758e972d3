"""Low-rank adaptation (LoRA): which layers get an adapter, its rank, its scale, and its dropout.

An adapted linear layer computes y = x W^T + s (drop(x) A) B, where s is alpha / rank, or
alpha / sqrt(rank) with rank stabilization (rsLoRA, arXiv 2312.03732), and drop sets a share of x to
zero while the adapter is trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import msgspec

from runtime.core.errors import UsageError

MOST_RANK, MOST_ALPHA = 4096, 1e6
MOST_PREFIX = 1024  # rows that prefix tuning trains
ALL_LINEAR: Literal["all-linear"] = "all-linear"
ALL_LAYERS = -1


class LoraSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of LoRA adapters.

    `targets` are the names of linear layers, such as `q_proj`, or "all-linear": all in transformer
    layers, but not the embedding and the head, which are named. `layers` says how many transformer
    layers get adapters, counted from the last one, -1 for all of them. `dropout` is the probability
    with which training drops a value of an adapter's input.

    With `prefix`, so many keys and values of every attention in these layers are trained instead
    (prefix tuning), and no linear layer is adapted.
    """

    rank: int
    alpha: float
    targets: Literal["all-linear"] | tuple[str, ...]
    layers: int = ALL_LAYERS
    dropout: float = 0.0
    rslora: bool = False
    prefix: int = 0

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def adapts(self, name: str, outside: bool = False) -> bool:
        """Whether a matrix gets an adapter, by the last part of its name; `outside` of layers or in
        one of them.
        """
        if self.prefix or self.targets == ALL_LINEAR:
            return not self.prefix and not outside
        return name.split(".")[-1] in self.targets

    def first_layer(self, count: int) -> int:
        """The first of `count` transformer layers that gets adapters."""
        return 0 if self.layers == ALL_LAYERS else max(0, count - self.layers)

    def check_targets(
        self, names: Collection[str], experts: Collection[str] = (), outside: Collection[str] = ()
    ) -> None:
        """Raise UsageError for a target that is not among a model's `names` of linear layers.

        `experts` are the names of matrices of experts, which have no adapters; `outside` those of
        the embedding and the head, or of one matrix that is both.
        """
        known = {*names, *outside}
        unknown = [] if self.targets == ALL_LINEAR else sorted(set(self.targets) - known)
        if of_experts := sorted(set(unknown) & set(experts)):
            raise UsageError(
                f"--lora-targets {','.join(of_experts)}: these are experts, which have no adapters "
                f"here; the linear layers are {', '.join(sorted(names))}"
            )
        if unknown:
            raise UsageError(
                f"--lora-targets {','.join(unknown)}: the model has no such linear layer; it has "
                f"{', '.join(sorted(names))}"
                + (f", and outside of its layers {' and '.join(outside)}" if outside else "")
                + (", by which its head multiplies, too" if len(outside) == 1 else "")
            )

    @property
    def problem(self) -> str:
        """The problem with a value; empty if there is none."""
        if not 0 < self.rank <= MOST_RANK:
            return f"rank is {self.rank}, not from 1 to {MOST_RANK}"
        if not 0 < self.alpha <= MOST_ALPHA:
            return f"alpha is {self.alpha:g}, not above 0 and at most {MOST_ALPHA:g}"
        if self.layers != ALL_LAYERS and self.layers < 1:
            return f"layers is {self.layers}, neither {ALL_LAYERS} nor 1 or more"
        if not 0 <= self.dropout < 1:
            return f"dropout is {self.dropout}, not from 0 to below 1"
        if not 0 <= self.prefix <= MOST_PREFIX:
            return f"prefix is {self.prefix}, not in 0..{MOST_PREFIX}"
        if self.prefix and self != prefix_settings(self.prefix):
            return "a prefix comes without other settings"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Every field but no prefix; msgspec leaves out defaults, but not all that equal them."""
        document = msgspec.structs.asdict(self)
        if not self.prefix:
            del document["prefix"]
        return document | {"targets": msgspec.to_builtins(self.targets)}

    def describe(self) -> str:
        """The settings in words."""
        if self.prefix:
            return f"a prefix of {self.prefix} keys and values in every layer"
        where = "all linear layers" if self.targets == ALL_LINEAR else ", ".join(self.targets)
        layers = "layer" if self.layers == 1 else f"{self.layers} layers"
        last = "" if self.layers == ALL_LAYERS else f" of the last {layers}"
        drop = f", dropout {self.dropout:g}" if self.dropout else ""
        alpha = f"alpha {self.alpha:g}{' (rsLoRA)' if self.rslora else ''}"
        return f"rank {self.rank}, {alpha}, on {where}{last}{drop}"


def prefix_settings(rows: int) -> LoraSettings:
    """The settings of prefix tuning: so many rows in every layer."""
    return LoraSettings(1, 1.0, (), prefix=rows)
