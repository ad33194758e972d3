"""Plans for tests, made for machines that are written down here, never for the test's own process.

A plan that a test makes of its own footprint would differ from one run of the tests to the next.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as replaced

from runtime.bundle.manifest import Manifest
from runtime.config.shared import StepConfig
from runtime.engine.sample import sample_bytes
from runtime.machine.backend import PANEL_BYTES, ROW_BYTES
from runtime.machine.machine import Blas, Heap, Machine
from runtime.methods.protocol import method as implementation
from runtime.plan.block_peaks import PeakModel
from runtime.plan.demand import Demand
from runtime.plan.lower import Sizes
from runtime.plan.plan import Plan, Request, Task
from runtime.plan.planner import Planner
from runtime.run.budget import EVALUATION

HEAP = Heap(
    flat_bytes=1_000_000,
    share=0.1,
    share_of_backward=0.05,
    share_beside_mapped=0.03,
    share_of_logits=0.4,
    share_of_kept=0.02,
)
LINUX = Machine("cpu", "unpacked", "glibc", 32_000_000, Blas(1, PANEL_BYTES, ROW_BYTES), HEAP)
COMPILED = replaced(LINUX, llvm=True)
MAC = Machine("gpu", "packed", "metal", 60_000_000)
EVAL = "eval"  # not a method, but planned like one
PLENTY = 1_000_000_000


def demand_of(
    method: str,
    rows: int = 1,
    accumulation: int = 1,
    queries: int | None = None,
    optimizer: str = "adamw",
    max_grad_norm: float = 0.0,
    lora_dropout: float = 0.0,
) -> Demand:
    """What a method needs of rows in micro-batches; `EVAL` is an evaluation."""
    if method == EVAL:
        return EVALUATION
    config = StepConfig(
        bundle="a bundle",
        method=method,
        batch_size=rows,
        grad_accumulation=accumulation,
        queries=queries,
        optimizer=optimizer,
        max_grad_norm=max_grad_norm,
        lora_dropout=lora_dropout,
    )
    return implementation(method).demand(config)


def task_of(
    bucket: int,
    method: str = "mebp",
    rows: int = 1,
    accumulation: int = 1,
    queries: int | None = None,
    **request: object,
) -> Task:
    """Training, or an evaluation, at a sequence bucket; `request` is what else is asked for."""
    asked = Request(bucket, rows, accumulation, **request)  # type: ignore[arg-type]
    demand = demand_of(method, rows, accumulation, queries)
    samples_bytes = (rows * accumulation - 1) * sample_bytes(bucket, packed=False)
    return Task(asked, replace(demand, objects_bytes=demand.objects_bytes + samples_bytes))


def plan_of(manifest: Manifest, task: Task, budget: int = PLENTY, machine: Machine = LINUX) -> Plan:
    """What a budget buys."""
    return Planner(manifest, machine).plan(task, budget)


def predicted(
    manifest: Manifest,
    task: Task,
    sizes: Sizes,
    budget: int = 0,
    lanes: int | None = None,
    machine: Machine = LINUX,
) -> Plan:
    """The plan at some sizes, whether it fits or not."""
    return Planner(manifest, machine).predict(task, sizes, budget, 0, lanes)


def peak_model_of(
    manifest: Manifest, task: Task, sizes: Sizes, machine: Machine = LINUX
) -> PeakModel:
    """What is alive at some sizes."""
    return Planner(manifest, machine).model(task, sizes)
