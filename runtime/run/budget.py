"""The budget of a run: a plan that fits it, and an error once the footprint exceeds it."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec

from runtime.bundle.manifest import Manifest
from runtime.bundle.store import Bundle
from runtime.config.shared import StepConfig
from runtime.core.errors import BudgetError, UsageError
from runtime.core.units import format_bytes
from runtime.engine.sample import sample_bytes
from runtime.machine.backend import this_machine
from runtime.machine.footprint import Meter
from runtime.machine.machine import Machine
from runtime.machine.machine_code import lacking
from runtime.methods.protocol import method
from runtime.operations.values import CHUNK_TOKENS
from runtime.plan.demand import Demand, lane_choices
from runtime.plan.limit import check_limit
from runtime.plan.lower import lower
from runtime.plan.plan import Plan, Request, Task, choose_bucket, deciding_differences
from runtime.plan.planner import DECODING_LANES, EVALUATION_LANES, Planner
from runtime.plan.size_levels import LEVELS

EVALUATION = Demand(slots=0, lanes=lane_choices(EVALUATION_LANES), all_adapters=True, trains=False)
"""The demand of an evaluation: the adapters of all blocks, and rows that travel together."""


def training(config: StepConfig, manifest: Manifest, workers: int = 1) -> Task:
    """The request and demand of this configuration of training, as one of so many workers.

    Raises:
        UsageError: rows are longer than the bundle has graphs for, or the method does not clip
            gradients, or drop inputs of adapters, and is asked to.
    """
    demand = method(config.method).demand(config)
    if config.max_grad_norm and not demand.stores_gradients:
        raise UsageError(
            f"--max-grad-norm {config.max_grad_norm:g}: {config.method} does not clip gradients; "
            "leave it out, and lower --learning-rate instead"
        )
    if config.lora_dropout and not demand.drops_inputs:
        raise UsageError(
            f"--lora-dropout {config.lora_dropout:g}: {config.method} has no dropout; leave it "
            "out, or give --lora-dropout 0 if the adapter in --adapter was trained with dropout"
        )
    if config.trains_all and not demand.trains_weights:
        raise UsageError(
            f"--trainable full: {config.method} trains adapters only; give --method mezo or "
            "another that sees losses only, or --trainable lora"
        )
    if config.trains_all and (names := (*manifest.expert_names, *manifest.table_names)):
        raise UsageError(
            f"--trainable full: the model has {', '.join(names)}, which hold experts, or rows that "
            "layers look up, and are not trained; give --trainable lora"
        )
    bucket = choose_bucket(manifest, config.max_seq_length or manifest.usual_bucket)
    further = config.batch_size * config.grad_accumulation - 1
    demand = replace(
        demand,
        packs=config.pack,
        sums_gradients=workers > 1,
        objects_bytes=demand.objects_bytes + further * sample_bytes(bucket, config.pack),
    )
    request = Request(
        bucket,
        config.batch_size,
        config.grad_accumulation,
        keeps=not demand.trains_weights,  # each tile of weights is read once a step
    )
    return Task(request, demand)


def plan_evaluation(
    bundle: Bundle,
    budget_bytes: int,
    max_seq_length: int,
    arithmetic: str = "auto",
) -> Plan:
    """The plan on this machine for forward passes over rows of `max_seq_length` tokens.

    Raises:
        BudgetError: nothing fits.
        UsageError: rows are longer than the bundle has graphs for.
    """
    task = evaluation(bundle.manifest, max_seq_length)
    return Planner(bundle.manifest, machine_for(bundle, arithmetic)).plan(task, budget_bytes)


def evaluation(manifest: Manifest, max_seq_length: int) -> Task:
    """The request and demand of forward passes over rows of `max_seq_length` tokens."""
    return Task(Request(choose_bucket(manifest, max_seq_length)), EVALUATION)


def decoding(at_once: int) -> Demand:
    """The demand of decoding: the adapters of all blocks, and a prompt's chunks that go together.

    `at_once` are the most tokens of a prompt.
    """
    chunks = min(DECODING_LANES, math.ceil(at_once / CHUNK_TOKENS))
    return replace(EVALUATION, lanes=lane_choices(chunks))


def plan_decoding(
    bundle: Bundle, budget_bytes: int, context: int, prompt: int | None = None
) -> Plan:
    """The plan on this machine to decode a sequence of at most `context` tokens.

    `prompt` is how many of them are known before; without it, they may be all.

    Raises:
        BudgetError: nothing fits.
    """
    request = Request(CHUNK_TOKENS, prefetch=False, context=context)  # read again for each token
    task = Task(request, decoding(context if prompt is None else prompt))
    return Planner(bundle.manifest, machine_for(bundle, "auto")).plan(task, budget_bytes)


def machine_for(bundle: Bundle, arithmetic: str, compute_dtype: str = "float32") -> Machine:
    """This machine, with the current footprint of the process.

    It is measured while a lowered model is in memory, because one will be during the run.

    Raises:
        UsageError: products are not available in this type.
    """
    manifest = bundle.manifest
    lowered = lower(manifest, manifest.buckets[-1], LEVELS[-1], packed=False)
    machine = this_machine(manifest.device, arithmetic, compute_dtype)
    del lowered
    return machine


def training_machine(config: StepConfig, bundle: Bundle) -> Machine:
    """As `machine_for`, with the libraries that the configuration's method loads."""
    method(config.method)
    if config.trains_prefix:
        from runtime.methods import first_prefix  # noqa: F401 - other runs need not load it
    if config.trains_all:
        from runtime.methods.full.run_weights import load

        load()
        if config.compute_dtype == "bfloat16":
            raise UsageError(
                "--compute-dtype bfloat16 with --trainable full: steps move the weights themselves "
                "by less than bfloat16 resolves; give float32"
            )
        return machine_for(bundle, config.arithmetic)
    return machine_for(bundle, config.arithmetic, config.compute_dtype)


def for_values(machine: Machine, manifest: Manifest, config: StepConfig) -> Machine:
    """The machine with float32, if "auto" was asked for, where values cannot be bfloat16.

    Raises:
        UsageError: bfloat16 was asked for.
    """
    if machine.compute_dtype == "float32":
        return machine
    on_gpu = machine.device == "gpu"
    reason = _only_float32(manifest) if on_gpu else uncompiled(machine, manifest)
    if not reason:
        return machine
    if config.compute_dtype == "bfloat16":
        raise UsageError(
            f"--compute-dtype bfloat16: {reason}; give float32, in a new run if this has begun"
        )
    return msgspec.structs.replace(machine, compute_dtype="float32", compute_reason=reason)


def _only_float32(manifest: Manifest) -> str:
    """The values of a GPU that bfloat16 cannot hold, in words; empty if there are none."""
    types = manifest.block_types.values()
    reasons = [each.only_float32 for block_type in types for each in block_type.operations]
    reason = next(filter(None, reasons), "")
    return reason and f"it does not hold {reason}, which go from layer to layer on a GPU"


def uncompiled(machine: Machine, manifest: Manifest) -> str:
    """Why compiled code, which alone multiplies bfloat16 on a CPU, does not run; empty if it does.

    Some matrices may be in floating point, and are multiplied in float32.
    """
    if not machine.llvm:
        return "it is multiplied by compiled code, which the machine does not run"
    if manifest.slice is not None:
        return "weights that workers send each other are dequantized to float32"
    if all(matrix.is_float for matrix in manifest.matrices.values()):
        return "it multiplies quantized weights, and those of this bundle are in floating point"
    return ""


def reason_to_replan(plan: Plan, made: Plan, planner: Planner, task: Task, budget: int) -> str:
    """The reason why a stored plan cannot be executed again; empty if it can.

    It is executed unchanged unless another budget (in bytes) is given, the bundle or the arithmetic
    has changed, it is not what its own choices come to (`made`, of `Planner.again`), or the process
    has grown so much that the plan no longer fits.

    Raises:
        BudgetError: the system would not let the process take the budget.
    """
    machine = planner.machine
    check_limit(machine, budget, plan.minimum_bytes)
    if plan.budget_bytes != budget:
        return f"the budget is {format_bytes(budget)}, no longer {format_bytes(plan.budget_bytes)}"
    own, now_here = ((each.arithmetic, each.compute_dtype) for each in (plan, machine))
    if plan.bucket not in planner.manifest.buckets or own != now_here:
        return "the bundle or the arithmetic has changed"
    if different := deciding_differences(plan, made):
        return f"its plan has {different[0]}"
    now = planner.peak_of(plan, task)
    if now > plan.budget_bytes:
        threads = machine.blas.threads
        more = (
            f", where {threads} threads take more memory than the {plan.threads} of its plan "
            f"(OPENBLAS_NUM_THREADS={plan.threads} has as many)"
        )
        return (
            f"it would take {format_bytes(now)} of a budget of {format_bytes(plan.budget_bytes)} "
            f"in this process{more if threads > plan.threads else ''}"
        )
    return ""


def plan_of_first(chosen: Plan, planner: Planner, task: Task, budget_bytes: int) -> Plan:
    """The plan of rank 0, which all workers execute, for this process on its machine.

    Raises:
        BudgetError: it does not fit.
        UsageError: it takes compiled code, which does not run here.
    """
    machine = planner.machine
    if chosen.compiled and not machine.llvm:
        raise UsageError(
            f"rank 0's plan, which all workers execute, multiplies by compiled code: "
            f"{lacking() or 'this process does not run it'}; mend that, leave this machine out, or "
            "have rank 0 do without: pip uninstall llvmlite"
        )
    if reason := reason_to_replan(chosen, chosen, planner, task, budget_bytes):
        raise BudgetError(
            f"rank 0's plan, which all workers execute, does not fit here: {reason}; give a larger "
            "--budget, or leave this machine out"
        )
    return msgspec.structs.replace(chosen, limit_bytes=machine.limit_bytes)


def check_budget(meter: Meter, plan: Plan, state: str) -> None:
    """Raise BudgetError if the footprint has exceeded the budget."""
    if meter.over_budget:
        raise passed_budget(meter.peak_bytes, plan, state)


def passed_budget(peak_bytes: int, plan: Plan, state: str, where: str = "") -> BudgetError:
    """The error for a footprint that has exceeded the budget, `where` several processes run."""
    return BudgetError(
        f"the run passed its budget{where}: footprint {format_bytes(peak_bytes, up=True)} > "
        f"{format_bytes(plan.budget_bytes)} (predicted "
        f"{format_bytes(plan.predicted_peak_bytes)}); {state}"
    )
