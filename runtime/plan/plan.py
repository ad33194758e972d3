"""A memory plan, the task that it is for, and where two plans differ."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from runtime.bundle.manifest import Manifest
from runtime.core.errors import UsageError
from runtime.operations.execution import Evaluation
from runtime.operations.values import F32
from runtime.plan.block_peaks import BlockPeak
from runtime.plan.demand import Demand
from runtime.plan.limit import limit_warning
from runtime.plan.lower import Sizes

Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Request(msgspec.Struct, frozen=True):
    """The task of a plan, besides the method's demand and the machine.

    Without `keeps`, MLPs are not sliced, and no budget is spent to keep anything. With `context`,
    sequences of at most so many tokens are decoded, and `bucket` is how many tokens a prompt's
    chunks have.
    """

    bucket: int
    rows: int = 1
    accumulation: int = 1
    keeps: bool = True
    prefetch: bool = True
    context: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A memory plan; `predicted_peak_bytes` is the predicted peak footprint of the process."""

    budget_bytes: Natural
    limit_bytes: Natural | None = None  # that the system sets, see `runtime.plan.limit`
    predicted_peak_bytes: Natural
    minimum_bytes: Natural
    process_bytes: Natural  # the process, its BLAS, opened graphs, kept vectors, prefetch thread
    adapter_bytes: Natural
    gradient_bytes: Natural
    weight_update_bytes: Natural = (
        0  # to update, perturb and write tiles, where weights are trained
    )
    live_bytes: Natural
    slack_bytes: Natural  # that the heap holds beyond what is in use
    cache_bytes: Natural  # that MLX's own cache may hold
    mapped_value_bytes: Natural  # of the largest value that may be mapped outside the heap
    value_bytes: Natural  # of the largest value, by which MLX may pass its limit
    scratch_disk_bytes: Natural
    bucket: int
    rows: Count
    accumulation: Count
    arithmetic: str
    threads: Count  # of the BLAS and of compiled code, whose memory counts
    tile_values: Count
    attention_block: Count = msgspec.field(name="query_block")
    slice_columns: Natural  # of its width that an MLP takes at once; 0: the whole width
    slice_values: Natural = 0  # of a matrix in a slice, backward; 0: as many as of any tile
    chunk_rows: Count
    evaluation: Evaluation = "part"
    prefetch: bool
    lanes: Count  # hidden states that run through a block's forward together
    evaluation_lanes: Count
    kept_layers: Natural  # how many of the last layers keep activations
    kept_products: Natural = 0  # how many of them keep the products inside their MLPs too,
    kept_mlps: Natural = 0  # and how many also what is activated of these
    stored_values: Natural = 0  # of layers that keep none, which a file holds
    kept_bytes: Natural  # of the peak, which the kept activations add
    materialized_layers: Natural  # how many of the first layers stay dequantized
    materialized_bytes: Natural
    blocks: tuple[BlockPeak, ...]
    context: Natural = 0  # of the sequences that are decoded
    cached_bytes: Natural = 0  # of the key-value cache
    materialized_head: bool = False  # whether the head's matrix stays dequantized too
    compute_dtype: str = "float32"  # of products with frozen weights
    in_place: bool = False  # whether decoded tokens are multiplied by weights where they lie
    compiled: bool = False  # whether code compiled by LLVM multiplies

    @property
    def sizes(self) -> Sizes:
        """The sizes at which operations run."""
        return Sizes(
            self.tile_values,
            self.attention_block,
            self.cache_bytes,
            self.slice_columns > 0,
            self.chunk_rows,
            self.evaluation,
            self.in_place,
            self.slice_values,
        )

    @property
    def kept(self) -> tuple[int, ...]:
        """How many of the last layers keep so much, see `way_of`."""
        return self.kept_layers, self.kept_products, self.kept_mlps

    @property
    def active_bytes(self) -> int:
        """The bytes that MLX has allocated at the peak."""
        fixed = self.adapter_bytes + self.gradient_bytes + self.weight_update_bytes
        fixed += self.cached_bytes
        return self.live_bytes + fixed + self.kept_bytes + self.materialized_bytes

    @property
    def warning(self) -> str:
        """The warning before a run that the system may end; usually empty."""
        return limit_warning(self.limit_bytes, self.budget_bytes, self.minimum_bytes)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


class Task(NamedTuple):
    """A request, and the demand of the method that is to run it."""

    request: Request
    demand: Demand


FACTS = ("limit_bytes", "minimum_bytes", "threads")
"""Fields of a plan that say how the machine and the process are, and decide nothing."""


def deciding_differences(plan: Plan, other: Plan) -> list[str]:
    """In which fields that decide what runs two plans differ, and how."""
    names = zip(Plan.__struct_fields__, Plan.__struct_encode_fields__, strict=True)
    values = {shown: (getattr(plan, name), getattr(other, name)) for name, shown in names}
    return [
        name if name == "blocks" else f"{name} {own}, where {others} follows from the rest"
        for name, (own, others) in values.items()
        if own != others and name not in FACTS
    ]


def choose_bucket(manifest: Manifest, tokens: int) -> int:
    """The smallest sequence bucket that holds so many tokens.

    Raises:
        UsageError: the longest bucket is shorter.
    """
    for bucket in manifest.buckets:
        if bucket >= tokens:
            return bucket
    longest = manifest.buckets[-1]
    raise UsageError(
        f"--max-seq-length {tokens} > {longest}, the longest that the bundle has graphs for; give "
        f"--max-seq-length {longest}, or export it again with --seq-lens "
        f"{','.join(map(str, (*manifest.buckets, tokens)))}"
    )


def scratch_files(
    manifest: Manifest, task: Task, stored_values: int, adapter_bytes: int
) -> dict[str, int]:
    """Bytes of each scratch file of a run, by the names with which `map_scratch` makes them.

    `stored_values` are those of layers that are stored for their backward, and `adapter_bytes`
    those of all adapters. Where all weights are trained, their two slots for each block count too.
    """
    demand = task.demand
    slots = len(manifest.blocks) if demand.slots is None else demand.slots
    row_bytes = demand.hidden_states * task.request.bucket * manifest.widest * F32
    files = {"activations": slots * row_bytes, "mlp-products": stored_values * row_bytes}
    if demand.trains_weights:
        return {**files, "weights": 2 * manifest.weights_nbytes}
    trained = adapter_bytes if demand.trains else 0
    stored = {"optimizer": demand.moments, "gradients": int(demand.stores_gradients)}
    return {**files, "adapters": trained, **{name: n * trained for name, n in stored.items()}}
