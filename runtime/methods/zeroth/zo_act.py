"""ZO-Act: MeZO on coefficients of a basis of each matrix's inputs, which stays as it is.

Dong et al., *ZO-Act: Efficient Zeroth-Order Fine-Tuning via One-Shot Activation-Informed Low-Rank
Subspaces* (arXiv 2607.01125). For an adapted matrix W (R, C), Q (C, r) is a basis of its inputs,
computed once at the beginning, and M (r, R) its coefficients:

    y = x W^T + s (x Q) M
    g_i = (loss(M + eps z_i) - loss(M - eps z_i)) / (2 eps)
    M <- M - rate (1/n) sum_i g_i z_i

So this is LoRA whose A is Q and is never trained; M is B, and begins as zeros.

The gradient of W is dy^T x, so its rows lie in the span of the inputs x (T, C). AGZO (Lin et al.,
arXiv 2601.17261) computes an orthonormal basis Q of that span's dominant part by power iterations
on x^T x, summed over rows of data:

    Q <- orth(x^T x Q)

x^T x is never stored: each iteration runs a block forward again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from runtime.arrays.stored import Block
from runtime.arrays.values import InputObserver
from runtime.config.shared import StepConfig
from runtime.config.train import TrainConfig
from runtime.core.errors import DivergedError, UsageError
from runtime.engine.model import Model
from runtime.engine.sample import NumberedRows, Row, Sample
from runtime.engine.visits import visit, visits
from runtime.methods.adapters import Adapters
from runtime.methods.protocol import Start
from runtime.methods.zeroth.descent import BY_NAME, descent_of
from runtime.methods.zeroth.forward_only import demand_of, start_with
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.plan.demand import Demand
from runtime.storage.activations import Activations

BASIS = "lora_a"  # how the names of the matrices Q end


ITERATIONS = 4  # AGZO takes "a few"
PASSES = ITERATIONS + 1  # of each row through an adapted block: the last one has the basis
Sums = dict[str, mx.array]  # x^T x Q (C, r) by the matrix's relative name


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
        observes_inputs=True,
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
    method = start_with(config, begin, Coefficients(config.directions), descent)
    if begin.fresh:
        assert begin.rows is not None, "a basis of inputs needs rows"
        rows, slots = _chosen(begin.rows, demand(config).hidden_states), method.activations
        if slots.rows < len(rows):  # every worker finds all bases, so that they are the same
            slots = Activations(begin.scratch, 1, len(rows), begin.activation_shape)
        model = begin.models(max(len(row.inputs) for row in rows))
        set_bases(model, begin.adapters, rows, slots)
        if begin.write_first is not None:
            begin.write_first(begin.adapters)
    return method


def _chosen(rows: NumberedRows, most: int) -> list[Row]:
    """As many rows as a step has hidden states, spread evenly over the training data."""
    count = min(most, len(rows))
    chosen = np.linspace(0, len(rows) - 1, count).astype(int).tolist()
    return [Row(*rows.row(index)) for index in chosen]


def set_bases(
    model: Model, adapters: Adapters, rows: Sequence[Sample], activations: Activations
) -> None:
    """Replace every A, in which the iterations begin, by a basis of its matrix's inputs.

    Every B must be zero, so that the inputs do not depend on A. `activations` has a slot for each
    row.

    Raises:
        UsageError: the rank is larger than a matrix has columns, or one is outside of layers.
        DivergedError: the inputs are not finite.
    """
    manifest = adapters.manifest
    ends = (*manifest.adapted(manifest.blocks[0]), *manifest.adapted(manifest.blocks[-1]))
    if ends:
        raise UsageError(
            f"--lora-targets {ends[0].split('.')[-1]} is not for zo-act, which trains coefficients "
            "of a basis of inputs inside of layers; give other targets, or --method mezo"
        )
    for name, (columns, rank) in Adapters.shapes(manifest).items():
        if name.endswith("lora_a") and rank > columns:
            raise UsageError(
                f"--lora-rank {rank} is too large for a basis of the inputs of {name}, which have "
                f"{columns} values; give {columns} or less"
            )
    with visit(model, 0):
        for slot, row in enumerate(rows):
            activations.put(0, slot, model.embed(row.inputs, offsets=row.offsets))
    last = max((at for at, block in enumerate(model.blocks) if manifest.adapted(block)), default=0)
    for layer in visits(model, range(1, last + 1)):
        block = layer.block
        if manifest.adapted(block):
            for _ in range(ITERATIONS):
                _iterate(model, block, adapters, rows, activations)
        for slot, row in enumerate(rows):
            loras = adapters.loras(block)
            y = model.forward(block, activations.get(0, slot), loras, row.offsets)
            activations.put(0, slot, y)


def _iterate(
    model: Model,
    block: Block,
    adapters: Adapters,
    rows: Sequence[Sample],
    activations: Activations,
) -> None:
    """One power iteration for all matrices of a block."""
    sums: Sums = {}
    loras = adapters.loras(block)
    for slot, row in enumerate(rows):
        watched = {
            name: replace(
                lora, observer=InputObserver(partial(_add, sums, name, lora.a), len(row.inputs))
            )
            for name, lora in loras.items()
        }
        model.forward(block, activations.get(0, slot), watched, row.offsets)
    del loras
    for name in list(sums):
        tensor = f"{block.tensor(name)}.lora_a"
        product = np.array(sums.pop(name), np.float64)
        if not np.isfinite(product).all():
            raise DivergedError(
                f"the inputs of {block.tensor(name)} are not finite before training: the bundle's "
                "weights or the adapter to start from are damaged; export the model again, or "
                "leave out --adapter"
            )
        adapters.tensors[tensor] = mx.array(np.linalg.qr(product)[0].astype(np.float32))


def _add(sums: Sums, name: str, q: mx.array, x: mx.array) -> None:
    """Add x^T (x Q) of inputs x (T, C) to the sum of a matrix."""
    part = ((x @ q).T @ x).T  # not x^T (x Q): threads of a BLAS would pack all of x
    sums[name] = mx.contiguous(part + sums[name] if name in sums else part)
    mx.eval(sums[name])
