"""The schedules: complete, with nothing recomputed or kept that nobody reads."""

from __future__ import annotations

import pytest
from support.bundles import Rng, Tiny
from support.models import each_family

from runtime.bundle.store import Bundle
from runtime.operations.attention import Attention
from runtime.operations.base import Operation
from runtime.operations.elementwise import Elementwise
from runtime.operations.gated import Gated
from runtime.operations.linear import Linear
from runtime.operations.program import Instruction, Program
from runtime.operations.sliced_mlp import SlicedMlp
from runtime.plan.operation_order import (
    backward_schedule,
    forward_schedule,
    keeping_schedule,
    kept_values,
    stored_values,
)
from runtime.plan.slices import fold

DEVICES = ("cpu", "gpu")


def programs_of(bundle: Bundle, device: str = "cpu") -> list[Program]:
    """The programs of the layers, as a device runs them."""
    manifest = bundle.manifest
    names = dict.fromkeys(block.type for block in manifest.layers)
    return [manifest.block_types[name].program(device) for name in names]


def linears_of(program: Program) -> list[str]:
    return [
        linear.name
        for operation in program.operations
        if isinstance(operation, Linear)
        for linear in operation.linears
    ]


def adapted_in(operation: Operation, adapted: frozenset[str]) -> dict[str, str]:
    """The adapted matrices of an operation, by the value that they make."""
    linears = operation.linears if isinstance(operation, Linear) else ()
    return {linear.output: linear.name for linear in linears if linear.name in adapted}


def read_forward(operation: Operation) -> set[str]:
    assert isinstance(operation, Linear | Attention | Elementwise | Gated)
    return {name for name in operation.inputs if name[0] != "@"}


def read_backward(one: Instruction, adapted: frozenset[str]) -> set[str]:
    """What the backward of an operation must find, by its equations."""
    operation = one.operation
    cotangents = {f"~{name}" for name in operation.results}
    if isinstance(operation, Elementwise):
        return cotangents | {name for name in operation.vjp_inputs if name[0] != "@"}
    if isinstance(operation, Gated):
        return cotangents | set(operation.inputs)
    if isinstance(operation, Attention):
        lse = f"{operation.outputs[0]}.lse"
        return cotangents | {*operation.inputs, *operation.outputs, lse}
    assert isinstance(operation, Linear)
    learned = adapted_in(operation, adapted)
    if not one.wanted:
        cotangents = {f"~{name}" for name in learned}
    return cotangents | set(operation.inputs if learned else ())


def follow(program: Program, adapted: frozenset[str], input_wanted: bool) -> set[str]:
    """Walk a backward schedule: everything read is alive, everything made is read."""
    alive, unread = {program.input, f"~{program.output}"}, set[str]()
    given = {f"~{program.input}"}
    gradients: set[str] = set()
    instructions = backward_schedule(program, adapted, input_wanted)
    for one in instructions:
        operation = one.operation
        if not one.backward:
            assert one.statistics == operation.statistics
            reads, made = read_forward(operation), {*one.wanted, *one.statistics}
        else:
            assert not one.statistics
            reads, made = read_backward(one, adapted), {f"~{name}" for name in one.wanted}
            gradients |= set(adapted_in(operation, adapted).values())
        zero = set[str]()
        if isinstance(operation, Elementwise):
            zero = {name for name in reads - alive if name.startswith("~")}
        assert reads - zero <= alive, (one, reads - alive)
        unread = (unread | made) - reads
        alive = (alive | made) - set(one.frees)
    assert gradients == adapted
    by_products = {name for one in program.operations for name in one.statistics}
    assert unread <= given | by_products, unread
    assert (f"~{program.input}" in alive) == input_wanted
    assert alive <= given | {program.input}, alive
    return {name for one in instructions if not one.backward for name in one.wanted}


@pytest.mark.parametrize("device", DEVICES)
@each_family
def test_backward_schedules_are_complete_and_waste_nothing(
    tiny: Tiny, rng: Rng, family: str, device: str
) -> None:
    for program in programs_of(tiny(family), device):
        names = linears_of(program)
        chosen = [frozenset(n for n in names if rng.random() < 0.4) for _ in range(20)]
        for adapted in (frozenset(names), *(c for c in chosen if c)):
            for input_wanted in (True, False):
                follow(program, adapted, input_wanted)


@pytest.mark.parametrize("device", DEVICES)
@each_family
def test_only_what_the_backward_reads_is_recomputed(tiny: Tiny, family: str, device: str) -> None:
    for program in programs_of(tiny(family), device):
        everything = frozenset(linears_of(program))
        recomputed = follow(program, everything, True)
        assert program.output not in recomputed
        # Gemma's norm after the MLP needs the MLP's result; elsewhere it is only added
        assert ("mlp.down_proj.out" in recomputed) == (family == "gemma3")
        assert "mlp.gate_proj.out" in recomputed
        last = program.operations[-2]
        assert isinstance(last, Linear)
        assert [linear.name for linear in last.linears] == ["mlp.down_proj"]
        down = frozenset(["mlp.down_proj"])
        only = follow(program, down, False)
        backward = [one for one in backward_schedule(program, down, False) if one.backward]
        assert {type(one.operation) for one in backward} <= {Elementwise, Linear}
        assert all(one.wanted in ((), ("mlp.down_proj.out",)) for one in backward)
        assert "mlp.down_proj.in" in only


@each_family
def test_norms_are_recomputed_where_they_are_read(tiny: Tiny, family: str) -> None:
    for program in programs_of(tiny(family)):
        everything = frozenset(linears_of(program))
        instructions = backward_schedule(program, everything, True)
        first = next(at for at, one in enumerate(instructions) if one.backward)
        late = [name for one in instructions[first:] if not one.backward for name in one.wanted]
        assert late == ["mlp.gate_proj.in", "self_attn.o_proj.in", "self_attn.q_proj.in"]
        kept = kept_values(program, everything, True)
        assert not kept & set(late)
        assert {"self_attn.o_proj.out", "mlp.down_proj.in"} <= kept
        assert instructions[first:] == backward_schedule(program, everything, True, kept)
        lowest = backward_schedule(program, everything, False)
        makes = [at for at, one in enumerate(lowest) if "self_attn.q_proj.in" in one.wanted]
        frees = [at for at, one in enumerate(lowest) if "self_attn.q_proj.in" in one.frees]
        mlp = next(at for at, one in enumerate(lowest) if one.backward)
        # x, which the norm before the MLP reads again, stays in place of what is made of it
        assert makes[0] <= frees[0] < mlp < makes[1] <= frees[1]
        assert next(at for at, one in enumerate(lowest) if "x" in one.frees) == makes[1]


@each_family
def test_gradients_that_are_one_array_are_added_once(tiny: Tiny, family: str) -> None:
    for program in programs_of(tiny(family)):
        instructions = backward_schedule(program, frozenset(linears_of(program)), True)
        graphs = {one.operation.graph[-1:]: one for one in instructions if one.backward}
        same = {key: dict(zip(graphs[key].wanted, graphs[key].same, strict=True)) for key in "053"}
        assert same["0"] == {"x": ""}
        assert same["5"]["x"] == "~out"
        if family == "gemma3":
            assert same["3"] == {"x": "", "self_attn.o_proj.out": ""}
        else:
            assert set(same["5"].values()) == {"~out"}
            assert same["3"] == {"x": "", "self_attn.o_proj.out": "~x"}


@each_family
def test_the_first_layer_computes_no_gradient_of_its_input(tiny: Tiny, family: str) -> None:
    (program, *_) = programs_of(tiny(family))
    everything = frozenset(linears_of(program))
    for one in backward_schedule(program, everything, False):
        assert "x" not in one.wanted
        assert not (one.backward and one.operation == program.operations[0])
    assert backward_schedule(program, frozenset(), False) == ()


@pytest.mark.parametrize("device", DEVICES)
@each_family
def test_forward_schedules_keep_only_the_output(tiny: Tiny, family: str, device: str) -> None:
    for block_type in tiny(family).manifest.block_types.values():
        program = block_type.program(device)
        alive = {program.input} - {""}
        ran = forward_schedule(program)
        for one in ran:
            assert set(one.operation.activations) <= alive
            assert not one.backward and not one.statistics
            alive = (alive | set(one.operation.results)) - set(one.frees)
        assert alive == {program.output}
        head = () if program.head is None else (program.head,)
        assert (*(one.operation for one in ran), *head) == program.operations


@pytest.mark.parametrize("device", DEVICES)
@each_family
def test_keeping_leaves_what_the_reverse_reads(
    tiny: Tiny, rng: Rng, family: str, device: str
) -> None:
    for program in programs_of(tiny(family), device):
        names = linears_of(program)
        for adapted in (frozenset(names), frozenset(n for n in names if rng.random() < 0.4)):
            for input_wanted in (True, False):
                for activated in (True, False):
                    kept = kept_values(program, adapted, input_wanted, activated)
                    check_keeping(program, adapted, input_wanted, kept, activated)
                some = frozenset(name for name in sorted(kept) if rng.random() < 0.5)
                check_keeping(program, adapted, input_wanted, some, activated)


def check_keeping(
    program: Program,
    adapted: frozenset[str],
    input_wanted: bool,
    kept: frozenset[str],
    activated: bool,
) -> None:
    """The forward leaves what is kept, and with it the backward has all that it reads."""
    alive = {program.input}
    for one in keeping_schedule(program, kept):
        assert set(one.operation.activations) <= alive
        made = {*one.wanted, *one.statistics}
        alive = (alive | made) - set(one.frees)
    assert alive - {program.input} == {program.output, *kept}
    alive = {program.input, f"~{program.output}", *kept}
    read = set[str]()
    for one in backward_schedule(program, adapted, input_wanted, kept, activated):
        needed = one.operation.activations
        if one.backward:
            needed = tuple(n for n in read_backward(one, adapted) if n[0] != "~")
        assert set(needed) <= alive
        assert one.backward or one.statistics or not kept & {*one.wanted}
        read |= set(needed)
        made = () if one.backward else (*one.wanted, *one.statistics)
        alive = (alive | {*made}) - set(one.frees)
    assert kept <= read


@each_family
def test_activations_can_be_recomputed_from_products_that_are_kept(tiny: Tiny, family: str) -> None:
    for program in programs_of(tiny(family)):
        everything = frozenset(linears_of(program))
        most, fewer = (kept_values(program, everything, True, each) for each in (True, False))
        assert most - fewer == {"mlp.down_proj.in"}
        ran = backward_schedule(program, everything, True, fewer, activated=False)
        assert sum("mlp.down_proj.in" in one.wanted for one in ran if not one.backward) == 1
        assert not any(one.operation.products for one in ran if not one.backward)


@each_family
def test_the_result_of_an_mlp_is_stored_where_a_norm_reads_it(tiny: Tiny, family: str) -> None:
    """So that no product of it is computed twice, but for those inside it."""
    for program in map(fold, programs_of(tiny(family), "cpu")):
        everything = frozenset(linears_of(program))
        kept = kept_values(program, everything, True)
        stored = stored_values(program, kept)
        assert stored == ({"mlp.down_proj.out"} if family == "gemma3" else set())
        ran = backward_schedule(program, everything, True, stored)
        mlps = [one.backward for one in ran if isinstance(one.operation, SlicedMlp)]
        assert mlps == [True]
