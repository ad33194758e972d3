"""What a budget buys: tile and block sizes, the allocator's cache, and the peak they lead to.

Pure arithmetic over the manifest (`runtime.planner.peak`). No figure is fitted to a model; the
constants describe the process (`BASE_BYTES`), its BLAS (`BLAS_BYTES_PER_THREAD`) and the allocator
(`runtime.planner.allocators.glibc`). A budget is spent in this order: what is needed at all, larger tiles of
tokens and of weights, what the backward would recompute, unpacked weights.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from ondevice.bundle.manifest import Manifest
from ondevice.errors import BudgetError, UsageError
from ondevice.units import format_bytes
from runtime.lowering.token_tiles import WHOLE
from runtime.planner.allocators.glibc import NONE, slack_of
from runtime.planner.peak import MEZO_LANES, BlockPlan, Liveness
from runtime.planner.workspace import F32, Sizes, Work
from runtime.storage.read_ahead import BUFFER_BYTES

# Interpreter, NumPy, MLX: measured on Linux x86-64; a guess on macOS, with Accelerate in it.
BASE_BYTES = {"linux": 26_500_000, "darwin": 60_000_000}
# What OpenBLAS packs factors into: a panel for each thread, and where several share a product,
# 320 columns of the tokens' side
BLAS_BYTES_PER_THREAD = 1_100_000
BLAS_BYTES_PER_ROW = 320 * F32
GRAPH_FACTOR = 7  # bytes of an opened graph, and of what describes it, for each of its file
MANIFEST_FACTOR = 300  # bytes of Python objects per tensor, graph and value of the manifest
HEAP_SLACK_PER_KEPT = 0.02
RESIDENT_SLACK = 1.03
# MLX's own cache (Metal) reuses buffers of nearly equal sizes only; more than this is never kept
CACHE_PER_LIVE = 1.5
EVAL_LANES = 8  # rows evaluated side by side, where they fit
READ_AHEAD_BYTES = 100_000  # the prefetch thread's stack, beside what it fills of its buffer
MARGIN = 0.97  # of the budget that a plan may predict


# MeBP as its paper describes it: a whole layer unpacked at once, all scores and all logits
PAPER = Sizes(1 << 62, 1 << 30, 128_000_000, hold=True)
LONG_TOKENS = 512  # an MLP takes no more at once: its weights cost nothing much beside so many
LEVELS = (
    Sizes(4 << 20, 256, 128_000_000, most_tokens=LONG_TOKENS),
    Sizes(4 << 20, 256, 96_000_000, most_tokens=LONG_TOKENS),
    Sizes(4 << 20, 128, 64_000_000, most_tokens=LONG_TOKENS),
    Sizes(2 << 20, 64, 48_000_000, most_tokens=LONG_TOKENS),
    Sizes(2 << 20, 64, 24_000_000, most_tokens=256),
    Sizes(1 << 20, 64, 24_000_000, most_tokens=256),
    Sizes(1 << 20, 64, 12_000_000, most_tokens=128),
    Sizes(1 << 20, 64, 12_000_000, most_tokens=64),
    Sizes(512 << 10, 32, 8_000_000, most_tokens=64),
    Sizes(256 << 10, 16, 4_000_000, most_tokens=64),
)
UNPACKED_FROM = 3  # of LEVELS, on a CPU: larger tiles and scores leave its caches


@dataclass(frozen=True)
class Plan:
    """A plan, in bytes; `predicted_peak_bytes` is the sum of what is alive at the worst moment."""

    budget_bytes: int
    predicted_peak_bytes: int
    minimum_bytes: int
    base_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    live_bytes: int
    slack_bytes: int  # of the heap, where freed memory goes back to it
    cache_bytes: int  # of MLX, where it keeps freed memory itself
    mapped_value_bytes: int  # of the largest value that is mapped where it is long; 0 for none
    value_bytes: int  # of the largest value of all tokens: so far MLX may allocate beyond a limit
    scratch_disk_bytes: int
    bucket: int
    rows: int
    accumulation: int
    arithmetic: str
    tile_values: int
    query_block: int
    token_tile: int  # that an MLP takes at once
    chunk_rows: int
    hold: bool
    prefetch: bool
    adapter_dtype: str
    lanes: int  # hidden states of training side by side in a block's forward
    eval_lanes: int
    kept_layers: int  # of the last layers, which keep what they would recompute (not in tiles)
    kept_bytes: int  # what that adds to the peak
    resident_layers: int  # of the first layers, whose weights stay unpacked
    resident_bytes: int
    blocks: tuple[BlockPlan, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_bucket(manifest: Manifest, length: int) -> int:
    """The smallest bucket that holds `length` tokens.

    Raises:
        UsageError: the ladder ends below it.
    """
    for bucket in manifest.buckets:
        if bucket >= length:
            return bucket
    raise UsageError(
        f"--max-seq-length {length} > {manifest.buckets[-1]}, the longest that the bundle has graphs "
        f"for; give --max-seq-length {manifest.buckets[-1]}, or export it again with --seq-lens "
        f"{','.join(map(str, (*manifest.buckets, length)))}"
    )


def make_plan(manifest: Manifest, work: Work, budget_bytes: int) -> Plan:
    """The most generous plan that fits.

    Raises:
        BudgetError: not even the most frugal one fits; the message has the numbers and a way out.
    """
    levels = _levels(work)
    smallest = math.ceil(_least(manifest, work) / MARGIN)
    plan = _without_token_tiles(manifest, work, levels[0], budget_bytes, smallest)
    if plan is not None:
        return plan
    for level in levels:
        for lanes in _lane_choices(work):
            plan = predict(manifest, work, level, budget_bytes, smallest, lanes)
            spare = int(MARGIN * budget_bytes) - plan.predicted_peak_bytes
            if spare >= 0:
                model = Liveness(manifest, work, level)
                spends = level is levels[0] and work.layout == "budget"
                return _spend(manifest, model, plan, spare) if spends else plan
    raise BudgetError(_refusal(manifest, work, budget_bytes, smallest))


def _without_token_tiles(
    manifest: Manifest, work: Work, level: Sizes, budget_bytes: int, smallest: int
) -> Plan | None:
    """The plan for long rows whose budget can keep all that a backward would recompute."""
    if work.method != "mebp" or work.bucket <= level.most_tokens:
        return None
    whole = replace(level, most_tokens=WHOLE)
    plan = predict(manifest, work, whole, budget_bytes, smallest)
    spare = int(MARGIN * budget_bytes) - plan.predicted_peak_bytes
    spent = _spend(manifest, Liveness(manifest, work, whole), plan, spare)
    return spent if spent.kept_layers == len(manifest.layers) else None


def _levels(work: Work) -> tuple[Sizes, ...]:
    """What a plan chooses among, from generous to frugal."""
    if work.layout == "paper":
        return (PAPER,)
    return LEVELS[UNPACKED_FROM:] if work.arithmetic == "unpacked" else LEVELS


def _least(manifest: Manifest, work: Work) -> int:
    """The lowest peak of all choices; the smallest tiles need not have it."""
    return min(predict(manifest, work, level, 0, 0).predicted_peak_bytes for level in _levels(work))


def _spend(manifest: Manifest, model: Liveness, plan: Plan, spare: int) -> Plan:
    """Buy time with what the budget leaves, the cheapest time first."""
    layers = range(1, len(manifest.blocks) - 1)
    kept = kept_bytes = resident = resident_bytes = 0
    if model.work.method == "mebp":
        for count in layers:
            more = model.live_bytes_keeping(plan.blocks, count) - plan.live_bytes
            added = int(more * (1 + HEAP_SLACK_PER_KEPT)) if plan.slack_bytes else more
            if added > spare:
                break
            kept, kept_bytes = count, added
    spare -= kept_bytes
    if model.work.arithmetic == "unpacked":
        for index in layers:
            size = int(model.unpacked_bytes(index) * RESIDENT_SLACK)
            if resident_bytes + size > spare:
                break
            resident, resident_bytes = resident + 1, resident_bytes + size
    return replace(
        plan,
        predicted_peak_bytes=plan.predicted_peak_bytes + kept_bytes + resident_bytes,
        kept_layers=kept,
        kept_bytes=kept_bytes,
        resident_layers=resident,
        resident_bytes=resident_bytes,
    )


def _peak(model: Liveness, blocks: tuple[BlockPlan, ...], share: float) -> tuple[int, int]:
    """What is alive beside adapters and gradients at the worst moment, and the heap's slack then.

    Embedding and head have none in hand: so much more of theirs fits.
    """
    found = [(model.perturbing_bytes(), 0)]
    for index, block in enumerate(blocks):
        live = max(block.forward_bytes, block.backward_bytes)
        lent, spared = model.only_in_layers(), 0
        if index in (0, len(blocks) - 1):
            lent, spared = spared, lent
        slack = int(share * max(0, live + lent - model.off_heap(index)))
        found.append((max(0, live - spared), slack))
    return max(found, key=sum)


def _lane_choices(work: Work) -> tuple[int, ...]:
    """How many hidden states may travel side by side, most first; MeBP's follow from its plan."""
    most = {"mebp": 1, "mezo": min(MEZO_LANES, work.hidden_states), "eval": EVAL_LANES}[work.method]
    fewest = 2 if work.method == "mezo" else 1
    return (most, *(n for n in (8, 4, 2, 1) if fewest <= n < most))


def _refusal(manifest: Manifest, work: Work, budget_bytes: int, smallest: int) -> str:
    name = manifest.provenance.get("name", manifest.family)
    rounded = math.ceil(smallest / 1e6) * 1_000_000
    text = (
        f"budget {format_bytes(budget_bytes)} < {format_bytes(rounded)} needed by {name} at "
        f"{work.bucket} tokens; the smallest that fits is {format_bytes(rounded)}"
    )
    room = MARGIN * budget_bytes
    for bucket in reversed([r for r in manifest.buckets if r < work.bucket]):
        if _least(manifest, replace(work, bucket=bucket)) <= room:
            return f"{text}, or use --max-seq-length {bucket}"
    if _least(manifest, replace(work, threads=1)) <= room:
        return f"{text}, or set OPENBLAS_NUM_THREADS=1: each of {work.threads} threads takes memory"
    if work.accumulation > 1 and work.method == "mebp":
        return f"{text}; without --grad-accumulation fewer gradients are held"
    return text


def predict(
    manifest: Manifest,
    work: Work,
    sizes: Sizes,
    budget_bytes: int,
    minimum_bytes: int,
    lanes: int | None = None,
) -> Plan:
    """The peak of one choice of sizes; `lanes` defaults to the fewest that the method can do."""
    model = Liveness(manifest, work, sizes)
    lanes = _lane_choices(work)[-1] if lanes is None else lanes
    blocks = tuple(model.block(index, lanes) for index in range(len(manifest.blocks)))
    heap = sys.platform == "linux" and manifest.device == "cpu"
    unused = slack_of(model) if heap else NONE
    live, slack = _peak(model, blocks, unused.share)
    slack += min(live // 4, unused.flat_bytes)
    most = max(EVAL_LANES, work.rows)
    room = live + model.only_in_layers()
    eval_lanes = lanes if work.method == "eval" else model.free_lanes(room, lanes, most)
    if work.method == "mebp":
        lanes = min(eval_lanes, work.rows)
    adapters = model.adapter_bytes()
    gradients = model.gradient_bytes()
    counted = len(manifest.matrices) + len(manifest.graphs) + len(manifest.vectors)
    base = BASE_BYTES["darwin" if sys.platform == "darwin" else "linux"]
    if sys.platform != "darwin":
        panel = min(BLAS_BYTES_PER_THREAD, model.workspace.largest_tile())
        base += work.threads * panel
        if work.threads > 1:
            base += model.packed_rows() * BLAS_BYTES_PER_ROW
    base += counted * MANIFEST_FACTOR + model.graph_file_bytes() * GRAPH_FACTOR
    if work.prefetch:
        base += READ_AHEAD_BYTES + min(BUFFER_BYTES, model.largest_packed_bytes())
    slots = {"mebp": len(manifest.blocks), "mezo": 1, "eval": 0}[work.method]
    row_bytes = work.bucket * manifest.hidden_size * F32
    cached = 0 if heap else min(sizes.cache_bytes, int(CACHE_PER_LIVE * live))
    trained = 0 if work.method == "eval" else model.all_adapter_bytes()
    moments = 2 * trained if work.method == "mebp" and work.optimizer == "adamw" else 0
    return Plan(
        budget_bytes=budget_bytes,
        predicted_peak_bytes=base + adapters + gradients + live + slack + cached,
        minimum_bytes=minimum_bytes,
        base_bytes=base,
        adapter_bytes=adapters,
        gradient_bytes=gradients,
        live_bytes=live,
        slack_bytes=slack,
        cache_bytes=cached,
        mapped_value_bytes=model.mapped_value(),
        value_bytes=model.largest_whole_value(),
        scratch_disk_bytes=slots * work.hidden_states * row_bytes + trained + moments,
        bucket=work.bucket,
        rows=work.rows,
        accumulation=work.accumulation,
        arithmetic=work.arithmetic,
        tile_values=sizes.tile_values,
        query_block=sizes.query_block,
        token_tile=model.token_tile,
        chunk_rows=model.workspace.chunk_rows,
        hold=sizes.hold,
        prefetch=work.prefetch,
        adapter_dtype=work.adapter_dtype,
        lanes=lanes,
        eval_lanes=eval_lanes,
        kept_layers=0,
        kept_bytes=0,
        resident_layers=0,
        resident_bytes=0,
        blocks=blocks,
    )
