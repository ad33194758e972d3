"""What people and programs are told of bundles and plans."""

from __future__ import annotations

import pytest
from support.bundles import Tiny
from support.plans import LINUX, MAC, PLENTY, plan_of, task_of

from ondevice.cli.describe import describe_bundle, describe_plan, facts_of
from runtime.core.units import format_bytes
from runtime.machine.machine import Machine


def test_a_matrix_is_described_as_it_is_stored(tiny: Tiny) -> None:
    bundle = tiny("qwen2", "mixed")
    lines = {line.split()[0]: line.split() for line in describe_bundle(bundle).splitlines() if line}
    facts = facts_of(bundle)["matrices"]
    for name, matrix in bundle.manifest.matrices.items():
        stored = [str(matrix.bits), str(matrix.group_size)]
        if matrix.is_float:
            stored = [matrix.packed.dtype, "-"]
        size = format_bytes(matrix.nbytes).split()
        assert lines[name][1:6] == [f"{matrix.rows}x{matrix.columns}", *stored, *size]
        told = {key: facts[name][key] for key in ("layout", "bits", "group_size", "dtype")}
        assert told == {
            "layout": matrix.layout,
            "bits": matrix.bits,
            "group_size": matrix.group_size,
            "dtype": matrix.packed.dtype,
        }


@pytest.mark.parametrize(
    ("machine", "weights"),
    [(LINUX, "{} weights in float32"), (MAC, "quantized weights multiplied as they are")],
)
def test_a_plan_says_how_weights_are_multiplied(tiny: Tiny, machine: Machine, weights: str) -> None:
    plan = plan_of(tiny("qwen2", "bfloat16").manifest, task_of(32), PLENTY, machine)
    told = describe_plan(plan.to_json())
    assert f"tiles: {weights.format(plan.tile_values)}, " in told
    kept = "dequantized" if machine is LINUX else "in memory"
    assert f"weights that stay {kept}: {plan.materialized_layers} layers" in told
