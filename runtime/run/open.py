"""A bundle opened for a plan: checked, mapped, limits set, a `Program` for every bucket in use."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field

import mlx.core as mx

from ondevice.bundle.store import Bundle, lock_bundle, open_bundle
from ondevice.config.shared import StepConfig
from runtime.engine.graphs import Graphs
from runtime.engine.kernels.attention import AttentionKernel
from runtime.engine.kernels.head import HeadKernel
from runtime.engine.kernels.linear import LinearKernel, Place
from runtime.engine.kernels.product import OpenTile
from runtime.engine.profile import Profile
from runtime.engine.program import Program
from runtime.lowering.token_tiles import WHOLE, longest_graph, widest_tile
from runtime.planner.plan import Plan, choose_bucket, make_plan
from runtime.planner.workspace import Work
from runtime.storage.weights import Weights
from runtime.system.backend import blas_threads, choose_arithmetic, limit_memory, use_device
from runtime.system.heap import place_values, trim_heap


@dataclass
class Session:
    """An open bundle and the plan it runs under."""

    bundle: Bundle
    plan: Plan
    weights: Weights
    profile: Profile = field(default_factory=Profile)
    _programs: dict[int, Program] = field(default_factory=dict)
    _opened: dict[Place, OpenTile] = field(default_factory=dict)
    _graphs: Graphs = field(default_factory=dict)

    def _resident(self) -> frozenset[int]:
        """Where the matrices begin that the plan keeps unpacked."""
        manifest = self.bundle.manifest
        return frozenset(
            manifest.matrices[block.tensor(linear.name)].packed.offset
            for block in manifest.blocks[1 : 1 + self.plan.resident_layers]
            for step in manifest.block_types[block.type].steps
            for linear in step.linears
        )

    def _bucket(self, length: int) -> int:
        """The smallest bucket that holds `length` tokens and whose tiles of tokens are no larger.

        A shorter bucket that tiles do not divide would take more memory than what was planned for.
        """
        manifest, plan = self.bundle.manifest, self.plan
        bucket = choose_bucket(manifest, length)
        longest = longest_graph(manifest, plan.bucket)
        for shorter in (one for one in manifest.buckets if bucket <= one < plan.bucket):
            tiles_fit = widest_tile(manifest, shorter, plan.token_tile) <= plan.token_tile
            if tiles_fit and longest_graph(manifest, shorter) <= longest:
                return shorter
        return max(bucket, plan.bucket)

    def program(self, length: int) -> Program:
        """The program of the smallest bucket that the plan has for `length` tokens."""
        bucket = self._bucket(length)
        if bucket not in self._programs:
            plan = self.plan
            linear = LinearKernel(
                self.weights,
                plan.arithmetic,
                plan.tile_values,
                plan.hold,
                self.profile,
                self._resident(),
                self._opened,
            )
            self._programs[bucket] = Program(
                self.bundle,
                self.weights,
                bucket,
                linear,
                AttentionKernel(plan.query_block),
                HeadKernel(linear, plan.chunk_rows),
                self.profile,
                plan.token_tile if plan.token_tile < plan.bucket else WHOLE,
                self._graphs,
            )
        return self._programs[bucket]


def plan_for(
    bundle: Bundle,
    budget_bytes: int,
    length: int,
    arithmetic: str,
    *,
    rows: int = 1,
    accumulation: int = 1,
    optimizer: str = "adamw",
    method: str = "mebp",
    queries: int = 1,
    layout: str = "budget",
    prefetch: bool = True,
    adapter_dtype: str = "float32",
) -> Plan:
    """The plan for rows of `length` tokens under a budget.

    Raises:
        BudgetError: nothing fits.
        UsageError: the ladder ends below `length`.
    """
    work = Work(
        bucket=choose_bucket(bundle.manifest, length),
        rows=rows,
        accumulation=accumulation,
        optimizer=optimizer,
        arithmetic=choose_arithmetic(arithmetic, bundle.manifest.device),
        method=method,
        queries=queries,
        layout=layout,
        prefetch=prefetch,
        adapter_dtype=adapter_dtype,
        threads=blas_threads(),
    )
    return make_plan(bundle.manifest, work, budget_bytes)


def plan_of(config: StepConfig, bundle: Bundle) -> Plan:
    """The plan for training as configured; raises as `plan_for`."""
    return plan_for(
        bundle,
        config.budget_bytes,
        config.max_seq_length,
        config.arithmetic,
        rows=config.batch_size,
        accumulation=config.grad_accumulation,
        optimizer=config.optimizer,
        method=config.method,
        queries=config.queries,
        layout=config.plan,
        prefetch=config.prefetch,
        adapter_dtype=config.adapter_dtype,
    )


def open_checked(path: str) -> Bundle:
    """Open a bundle whose graphs this MLX can run, with every checksum verified."""
    bundle = open_bundle(path)
    bundle.check_mlx()
    bundle.verify()
    return bundle


def open_session(bundle: Bundle, plan: Plan) -> Session:
    """Set up the device and its limits for a plan, and map the weights.

    What opening the bundle has left on the heap is given back: it would lie between the blocks of
    all that follows.
    """
    use_device(bundle.manifest.device, bundle.path)
    active = plan.live_bytes + plan.adapter_bytes + plan.gradient_bytes
    active += plan.kept_bytes + plan.resident_bytes
    limit_memory(max(0, active - plan.value_bytes), plan.cache_bytes)
    mx.clear_cache()
    trim_heap()
    place_values(plan.mapped_value_bytes)
    session = Session(bundle, plan, Weights(bundle, plan.prefetch))
    weakref.finalize(session, os.close, lock_bundle(bundle.path, alone=False))
    return session
