"""Opening a bundle for a plan: checks, mapped weights, memory limits, and models by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import mlx.core as mx

from runtime.arrays.compiled_products import compile_for
from runtime.arrays.matrices import Place
from runtime.arrays.packed_rows import PackedRows
from runtime.arrays.profile import Profile
from runtime.arrays.stored_codes import Mapped
from runtime.arrays.tile_products import ReadyTile
from runtime.arrays.weight_source import WeightSource
from runtime.bundle.store import Bundle, open_bundle
from runtime.core.notes import Note, silent, warning
from runtime.engine.graphs import Graphs
from runtime.engine.model import Model
from runtime.machine.backend import limit_memory, use_device
from runtime.machine.glibc import place_values, trim_heap
from runtime.machine.machine_code import why_not_kept
from runtime.machine.openblas import blas_threads, share_cores
from runtime.operations.attention_kernel import prepare as prepare_attention
from runtime.operations.gated_kernel import prepare as prepare_gates
from runtime.plan.lower import lower
from runtime.plan.plan import Plan, choose_bucket
from runtime.run.traced_graphs import with_graphs
from runtime.storage.weights import Weights


@dataclass
class Session:
    """An open bundle and the plan it runs under."""

    bundle: Bundle
    plan: Plan
    weights: WeightSource
    graphs: Graphs
    profile: Profile = field(default_factory=Profile)
    in_place: PackedRows | None = None
    mapped: Mapped | None = None
    _models: dict[int, Model] = field(default_factory=dict)
    _materialized: dict[Place, ReadyTile] = field(default_factory=dict)

    def model(self, tokens: int) -> Model:
        """The model of the smallest sequence bucket for `tokens` tokens, at most the plan's."""
        return self.at(choose_bucket(self.bundle.manifest, tokens))

    def at(self, bucket: int) -> Model:
        """The model of a sequence bucket.

        Under a plan with a context it decodes so many tokens at once, one of `DECODED_TOKENS`.
        """
        plan = self.plan
        if bucket not in self._models:
            lowered = lower(
                *(self.bundle.manifest, bucket, plan.sizes, plan.arithmetic == "packed"),
                *(plan.context, plan.compute_dtype, plan.compiled),
            )
            self._models[bucket] = Model(
                self.bundle,
                self.weights,
                lowered,
                self.graphs,
                self.profile,
                self._materialized,
                in_place=self.in_place,
                mapped=self.mapped,
            )
        return self._models[bucket]

    def materialize(self) -> None:
        """Load the weights that the plan keeps in memory: of layers, and the head's matrix."""
        manifest, plan = self.bundle.manifest, self.plan
        layers, head = manifest.layers[: plan.materialized_layers], manifest.blocks[-1]
        chosen = [matrix for block in layers for matrix in manifest.matrices_of(block)]
        if plan.materialized_head and plan.context:
            chosen += manifest.matrices_of(head)
        model = self.at(plan.bucket)
        model.matrices.materialize(chosen)
        if plan.materialized_head and not plan.context:
            model.exact_matrices.materialize(manifest.matrices_of(head), plan.chunk_rows)


def open_verified(path: str) -> Bundle:
    """Open a bundle and check every checksum. Its graphs do not run."""
    bundle = open_bundle(path)
    bundle.verify()
    return bundle


def open_checked(path: str, device: str = "auto", note: Note = silent, workers: int = 1) -> Bundle:
    """Open a bundle, check every checksum, and find the graphs that may run (`with_graphs`).

    Raises:
        UsageError: it is a slice of a bundle, and there is one worker only.
    """
    bundle = open_verified(path)
    if workers == 1:
        bundle.require_whole()
    return with_graphs(bundle, device, note)


def open_session(
    bundle: Bundle, plan: Plan, weights: WeightSource | None = None, note: Note = silent
) -> Session:
    """Set up the device and its limits for a plan, and map the weights, unless they are given.

    It also gives free heap memory back, so that none lies between later blocks, and dequantizes
    the weights that stay dequantized before anything else is allocated. `note` is told if compiled
    code cannot be kept.
    """
    use_device(bundle.manifest.device)
    share_cores(plan.compiled and weights is None)
    live_bytes = max(0, plan.active_bytes - plan.value_bytes)
    limit_memory(bundle.manifest.device, live_bytes, plan.cache_bytes)
    mx.clear_cache()
    trim_heap()
    place_values(plan.mapped_value_bytes)
    in_place = mapped = None
    matrices, types = bundle.manifest.matrices.values(), bundle.manifest.block_types.values()
    if weights is None:
        weights = on_disk = Weights(bundle, plan.prefetch, releases=not plan.in_place)
        if plan.in_place:
            in_place = PackedRows(on_disk, blas_threads())
            in_place.prepare(matrices)
        if plan.compiled:
            mapped = on_disk
            compile_for(matrices, plan.compute_dtype)
            every = chain.from_iterable(each.operations for each in types)
            operations = [each.on_device("cpu") for each in every]
            prepare_gates(operations)
            prepare_attention([] if plan.context else operations)
        if refusal := why_not_kept():
            note(warning(refusal))
    session = Session(bundle, plan, weights, Graphs(bundle), in_place=in_place, mapped=mapped)
    session.materialize()
    return session
