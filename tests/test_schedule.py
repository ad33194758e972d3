"""The schedules: complete, with nothing recomputed or kept that nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from conftest import FAMILIES, program_of
from test_programs import adapters_of

from ondevice.bundle.manifest import Step
from ondevice.bundle.store import Bundle
from ondevice.operations.program import BlockType
from runtime.lowering.schedule import (
    activations,
    backward_schedule,
    forward_schedule,
    kept_values,
    lse,
    outputs,
)

Rng = np.random.Generator
Tiny = Callable[..., Bundle]


def kinds_of(bundle: Bundle) -> list[BlockType]:
    manifest = bundle.manifest
    return [manifest.block_types[name] for name in dict.fromkeys(b.type for b in manifest.layers)]


def linears_of(kind: BlockType) -> list[str]:
    return [linear.name for step in kind.steps for linear in step.linears]


def needy(step: Step, output: str, adapted: frozenset[str]) -> bool:
    return any(linear.output == output and linear.name in adapted for linear in step.linears)


def follow(kind: BlockType, adapted: frozenset[str], input_too: bool) -> set[str]:
    """Walk a backward schedule: everything read is alive, everything made is read."""
    alive, unread, given = {kind.input, f"~{kind.output}"}, set(), {f"~{kind.input}"}
    gradients: set[str] = set()
    for op in backward_schedule(kind, adapted, input_too):
        step = kind.steps[op.step]
        if not op.backward:
            reads, made = set(activations(step)), set(op.wanted)
            if step.op == "attention":
                made.add(lse(step))
        else:
            reads = {
                f"~{name}"
                for name in outputs(step)
                if step.op != "linear" or op.wanted or needy(step, name, adapted)
            }
            if step.op == "elementwise":
                reads |= {name for name in step.vjp_inputs if name[0] not in "@"}
            elif step.op == "attention":
                reads |= {*step.inputs, *step.outputs, lse(step)}
            elif any(linear.name in adapted for linear in step.linears):
                reads |= set(step.inputs)
            made = {f"~{name}" for name in op.wanted}
            gradients |= {linear.name for linear in step.linears if linear.name in adapted}
        zero = {name for name in reads - alive if name.startswith("~") and step.op == "elementwise"}
        assert reads - zero <= alive, (op, reads - alive)
        unread = (unread | made) - reads
        alive = (alive | made) - set(op.frees)
    assert gradients == adapted
    by_products = {lse(step) for step in kind.steps if step.op == "attention"}
    assert unread <= given | by_products, unread
    assert (f"~{kind.input}" in alive) == input_too
    assert alive <= given | {kind.input}, alive
    return {
        n
        for op in backward_schedule(kind, adapted, input_too)
        if not op.backward
        for n in op.wanted
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_schedules_are_complete_and_waste_nothing(
    tiny: Tiny, rng: Rng, family: str
) -> None:
    for kind in kinds_of(tiny(family)):
        names = linears_of(kind)
        chosen = [frozenset(n for n in names if rng.random() < 0.4) for _ in range(20)]
        for adapted in (frozenset(names), *(c for c in chosen if c)):
            for input_too in (True, False):
                follow(kind, adapted, input_too)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_the_backward_reads_is_recomputed(tiny: Tiny, family: str) -> None:
    for kind in kinds_of(tiny(family)):
        everything = frozenset(linears_of(kind))
        again = follow(kind, everything, True)
        assert kind.output not in again
        # Gemma's norm after the MLP needs the MLP's result; elsewhere it is only added
        assert ("mlp.down_proj.out" in again) == (family == "gemma3")
        assert "mlp.gate_proj.out" in again
        last = kind.steps[-2]
        assert [linear.name for linear in last.linears] == ["mlp.down_proj"]
        only = follow(kind, frozenset(["mlp.down_proj"]), False)
        backward = [
            op for op in backward_schedule(kind, frozenset(["mlp.down_proj"]), False) if op.backward
        ]
        assert {kind.steps[op.step].op for op in backward} <= {"elementwise", "linear"}
        assert all(op.wanted in ((), ("mlp.down_proj.out",)) for op in backward)
        assert "mlp.down_proj.in" in only


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_made_again_where_they_are_read(tiny: Tiny, family: str) -> None:
    for kind in kinds_of(tiny(family)):
        everything = frozenset(linears_of(kind))
        ops = backward_schedule(kind, everything, True)
        first = next(at for at, op in enumerate(ops) if op.backward)
        again = [name for op in ops[first:] if not op.backward for name in op.wanted]
        assert again == ["mlp.gate_proj.in", "self_attn.o_proj.in", "self_attn.q_proj.in"]
        kept = kept_values(kind, everything, True)
        assert not kept & set(again)
        assert {"self_attn.o_proj.out", "mlp.down_proj.in"} <= kept
        assert ops[first:] == backward_schedule(kind, everything, True, kept=True)
        lowest = backward_schedule(kind, everything, False)  # where nothing else reads x again
        assert sum("self_attn.q_proj.in" in op.wanted for op in lowest) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_that_are_one_array_are_added_once(tiny: Tiny, family: str) -> None:
    for kind in kinds_of(tiny(family)):
        ops = backward_schedule(kind, frozenset(linears_of(kind)), True)
        graphs = {kind.steps[op.step].graph[-1:]: op for op in ops if op.backward}
        same = {key: dict(zip(graphs[key].wanted, graphs[key].same, strict=True)) for key in "053"}
        assert same["0"] == {"x": ""}
        assert same["5"]["x"] == "~out"
        if family == "gemma3":
            assert same["3"] == {"x": "", "self_attn.o_proj.out": ""}
        else:
            assert set(same["5"].values()) == {"~out"}
            assert same["3"] == {"x": "", "self_attn.o_proj.out": "~x"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_layer_computes_no_gradient_of_its_input(
    tiny: Tiny, rng: Rng, family: str
) -> None:
    bundle = tiny(family)
    (kind, *_) = kinds_of(bundle)
    everything = frozenset(linears_of(kind))
    for op in backward_schedule(kind, everything, False):
        assert "x" not in op.wanted
        assert not (op.backward and op.step == 0)
    assert backward_schedule(kind, frozenset(), False) == ()
    program, block = program_of(bundle, 16), bundle.manifest.blocks[1]
    shape = (1, 16, bundle.manifest.hidden_size)
    x, dy = (mx.array(rng.standard_normal(shape).astype(np.float32)) for _ in range(2))
    loras = adapters_of(bundle, rng).loras(block)
    dx, full = program.backward(block, x, dy, loras, input_too=True)
    none, partial = program.backward(block, x, dy, loras, input_too=False)
    assert none is None
    assert dx.shape == shape
    for name, pair in full.items():
        assert all(mx.array_equal(a, b) for a, b in zip(pair, partial[name], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_schedules_keep_only_the_output(tiny: Tiny, family: str) -> None:
    for kind in tiny(family).manifest.block_types.values():
        alive = {kind.input} - {""}
        for op in forward_schedule(kind):
            step = kind.steps[op.step]
            assert set(activations(step)) <= alive
            alive = (alive | set(outputs(step))) - set(op.frees)
        assert alive == {kind.output}
