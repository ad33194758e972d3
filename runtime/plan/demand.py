"""The needs of a training method in memory and on disk.

Every method in `runtime.methods` declares its demand; the planner knows no method by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """The needs of one step.

    rows: rows of a micro-batch whose backward runs block by block together; each keeps its values.
    hidden_states: activation checkpoints of one block boundary that a step stores at once.
    slots: block boundaries whose checkpoints are stored at once; None for every boundary.
    lanes: numbers of batch lanes that may visit a block together, descending; the first that fits.
    lanes_in_spare_memory: the most lanes in a forward pass, if more lanes do not raise the peak.
    backward: whether blocks run backward; gradients and kept values exist only then.
    holds_gradients: whether the gradients of all layers stay until the step's last micro-batch.
    adapter_copies: copies of a block's adapters in memory while the block runs.
    scratch_copies: further memory while these are made, in multiples of a block's adapters.
    all_adapters: whether the adapters of all blocks are in memory at once.
    trains: whether adapters are trained; then they live in a scratch file, and evaluations occur.
    moments: float32 values of optimizer state for each trained value, in a scratch file.
    stores_gradients: whether the gradients of all layers are in a scratch file during a step.
    drops_inputs: whether training drops values of the adapters' inputs.
    observes_inputs: whether the inputs of adapted matrices are looked at, each whole.
    trains_weights: whether all weights are trained, in place of adapters.
    noise_bytes: memory in which noise for the weights is drawn.
    shares: whether several workers can share out a step.
    sums_gradients: whether the gradients of blocks that run backward are summed over workers.
    objects_bytes: of the samples of a step, and the numbers of its hidden states, beyond the first.
    packs: whether a hidden state may be that of several packed rows, whose starts attention reads.
    """

    rows: int = 1
    hidden_states: int = 1
    slots: int | None = None
    lanes: tuple[int, ...] = (1,)
    lanes_in_spare_memory: int = 0
    backward: bool = False
    holds_gradients: bool = False
    adapter_copies: int = 1
    scratch_copies: int = 0
    all_adapters: bool = False
    trains: bool = True
    moments: int = 0
    stores_gradients: bool = False
    drops_inputs: bool = False
    observes_inputs: bool = False
    trains_weights: bool = False
    noise_bytes: int = 0
    shares: bool = False
    sums_gradients: bool = False
    objects_bytes: int = 0
    packs: bool = False


def lane_choices(most: int, fewest: int = 1) -> tuple[int, ...]:
    """`most` batch lanes, and the powers of two below it down to `fewest`."""
    return (most, *(n for n in (8, 4, 2, 1) if fewest <= n < most))
