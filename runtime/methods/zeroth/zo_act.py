"""ZO-Act: MeZO on coefficients of a basis of each matrix's inputs, which stays as it is.

Dong et al., *ZO-Act: Efficient Zeroth-Order Fine-Tuning via One-Shot Activation-Informed Low-Rank
Subspaces* (arXiv 2607.01125). For an adapted matrix W (R, C), Q (C, r) is a basis of what reaches
it, found once at the beginning (`runtime.methods.zeroth.activation_basis`), and M (r, R) its
coefficients:

    y = x W^T + s (x Q) M
    g_i = (loss(M + eps z_i) - loss(M - eps z_i)) / (2 eps)
    M <- M - rate (1/n) sum_i g_i z_i

So this is LoRA whose A is Q and is never trained; M is B, and begins as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError
from runtime.engine.sample import NumberedRows, Row
from runtime.methods.protocol import Start
from runtime.methods.zeroth.activation_basis import PASSES, set_bases
from runtime.methods.zeroth.descent import BY_NAME, descent_of
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand

BASIS = "lora_a"  # how the names of the matrices Q end


@dataclass
class Coefficients(TwoPoint):
    """SPSA of the coefficients alone: the basis stays, and so no weight decay reaches it either."""

    log_fields = ("frozen",)

    @classmethod
    def trains(cls, tensor: str) -> bool:
        return not tensor.endswith(BASIS)

    def header(self) -> dict[str, Any]:
        return {"frozen": BASIS}

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        if fields["frozen"] != BASIS:
            raise ValueError(f"it does not train {fields['frozen']!r:.80}, but {BASIS} alone stays")


def demand(config: StepConfig) -> Demand:
    """See `demand_of`: two hidden states for each row and direction; for new adapters only.

    Raises:
        UsageError: trained adapters are given, whose A no basis could replace; or a prefix is to
            be trained, which has no inputs.
    """
    if config.adapter is not None:
        raise UsageError(
            f"--adapter is not for {config.method}: it begins with new adapters, whose A is a "
            "basis of the inputs; leave it out, or give --method mezo"
        )
    if config.trainable == "prefix":
        raise UsageError(
            f"--trainable prefix is not for {config.method}, which trains coefficients of a basis "
            "of matrices' inputs; give --method mezo, or --trainable lora"
        )
    return replace(
        demand_of(config, Coefficients(config.directions), BY_NAME[config.zo_optimizer_name]),
        trains_weights=False,
    )


def first_passes(config: StepConfig, rows: int | None) -> int:
    """The forward passes that find the bases, at most; `rows` are those of the training data.

    As many rows as a step has hidden states are run, whose slots they take.
    """
    most = demand(config).hidden_states
    return PASSES * (most if rows is None else min(most, rows))


def start(config: TrainConfig, begin: Start) -> ZerothOrder:
    """The method at its beginning, where it finds the bases, or after a save, which holds them."""
    descent = descent_of(config.zo_optimizer_name, config.zo_window_size)
    method = start_with(config, begin, Coefficients(config.directions), descent=descent)
    if begin.fresh:
        assert begin.rows is not None, "a basis of inputs needs rows"
        rows = _chosen(begin.rows, method.activations.rows)
        model = begin.models(max(len(row.inputs) for row in rows))
        set_bases(model, begin.adapters, rows, method.activations)
        if begin.keep is not None:
            begin.keep(begin.adapters)
    return method


def _chosen(rows: NumberedRows, most: int) -> list[Row]:
    """As many rows as a step has hidden states, spread evenly over the training data."""
    count = min(most, len(rows))
    chosen = np.linspace(0, len(rows) - 1, count).astype(int).tolist()
    return [Row(*rows.row(index)) for index in chosen]
