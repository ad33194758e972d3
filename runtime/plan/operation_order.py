"""The order in which a program's operations run, and when each value is freed.

The forward schedule is the program itself. The backward schedule of a block first recomputes the
values that its backward reads (and no others), then runs the operations' backwards in reverse; an
operation whose inputs need no gradient is left out. The forward may keep some or all of those
values instead. Results of cheap operations, such as norms, are recomputed just before they are
read, if their inputs are in memory then. Gradients are named `~value`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from runtime.operations.base import Operation
from runtime.operations.program import Instruction, Program
from runtime.operations.values import T, gradient_of


@dataclass(frozen=True)
class _Use:
    """An instruction without the values that it frees, but with the values that it reads."""

    backward: bool
    operation: Operation
    wanted: tuple[str, ...]
    read: tuple[str, ...]


@dataclass(frozen=True)
class _Reverse:
    """The backward of one operation: the gradients wanted, and the forward values read."""

    operation: Operation
    wanted: tuple[str, ...]
    read: frozenset[str]


def forward_schedule(program: Program) -> tuple[Instruction, ...]:
    """All operations except a head, in order; only the output is not freed."""
    uses = [_forward(operation) for operation in program.operations if operation.in_schedule]
    return _with_frees(uses, {program.output}, statistics=False)


def needs_gradient(program: Program, adapted: frozenset[str], input_wanted: bool) -> frozenset[str]:
    """The values whose gradients lead to an adapter (or, if wanted, to the block's input)."""
    needy = {program.input} if input_wanted else set()
    for operation in program.operations:
        if operation.reversible and any(name in needy for name in operation.activations):
            needy |= set(operation.results)
        needy |= set(operation.learned_results(adapted))
    return frozenset(needy)


def kept_values(
    program: Program, adapted: frozenset[str], input_wanted: bool, activated: bool = True
) -> frozenset[str]:
    """The forward's values that the backward reads and does not recompute late, except the input.

    Without `activated`, activations of products are recomputed late too.
    """
    reverse = _reverse(program, adapted, input_wanted)
    return _waiting(program, reverse, activated) - {program.input}


def stored_values(program: Program, kept: frozenset[str]) -> frozenset[str]:
    """Those of `kept_values` that take long to recompute, and are no larger than hidden states."""
    worth = (operation for operation in program.operations if operation.worth_storing)
    made = {name for operation in worth for name in operation.results}
    *tokens, most = program.values[program.output]
    shapes = {name: program.values[name] for name in kept & made}
    return frozenset(
        name
        for name, (*others, width) in shapes.items()
        if others == tokens and int(width) <= int(most)
    )


def keeping_schedule(program: Program, kept: frozenset[str]) -> tuple[Instruction, ...]:
    """The forward that frees neither the output nor the values `kept` for a backward."""
    uses = [_forward(operation) for operation in program.operations if operation.in_schedule]
    statistics = any(kept.intersection(operation.statistics) for operation in program.operations)
    return _with_frees(uses, {program.output, *kept}, statistics)


def backward_schedule(
    program: Program,
    adapted: frozenset[str],
    input_wanted: bool,
    kept: frozenset[str] = frozenset(),
    activated: bool = True,
) -> tuple[Instruction, ...]:
    """The instructions that recompute values, and then run the backwards in reverse order.

    They start from `~output`, and end with `~input` if `input_wanted`. They also start from the
    values `kept`, those of `kept_values` or some of them, and recompute the others.
    """
    reverse = _reverse(program, adapted, input_wanted)
    again = _recomputed_late(program, reverse, activated)
    uses = _recompute(program, _waiting(program, reverse, activated), kept)
    for position, step in enumerate(reverse):
        uses += [_forward(made) for made, before in again if before == position]
        cotangents = {gradient_of(name) for name in step.operation.results}
        read = tuple(step.read | cotangents)
        uses.append(_Use(True, step.operation, step.wanted, read))
    return _with_shared(_with_frees(uses, {gradient_of(program.input)}, statistics=True))


def _forward(operation: Operation) -> _Use:
    return _Use(False, operation, operation.results, operation.activations)


def _reverse(program: Program, adapted: frozenset[str], input_wanted: bool) -> list[_Reverse]:
    needy = needs_gradient(program, adapted, input_wanted)
    reached = {program.output}  # by gradients
    reverse = []
    for operation in reversed(program.operations):
        if not operation.reversible or not set(operation.results) & needy & reached:
            continue
        wanted = tuple(name for name in operation.gradients if name in needy)
        reached.update(wanted)
        if wanted or operation.learns(adapted):
            reverse.append(_Reverse(operation, wanted, operation.read_by_backward(adapted)))
    return reverse


def _recompute(program: Program, needed: frozenset[str], kept: frozenset[str]) -> list[_Use]:
    """The operations that lead from the block's input, and values kept, to the values needed."""
    wanted = set(needed - kept)
    uses: list[_Use] = []
    for operation in reversed(program.operations):
        made = tuple(name for name in operation.results if name in wanted)
        if wanted & set(operation.statistics):
            made = operation.results
        if made:
            uses.append(_Use(False, operation, made, operation.activations))
            wanted |= set(operation.activations) - kept
    return uses[::-1]


def _waiting(
    program: Program, reverse: Sequence[_Reverse], activated: bool = True
) -> frozenset[str]:
    """The values that must exist before the backwards run."""
    read = frozenset[str]().union(*(step.read for step in reverse))
    late = (operation.results for operation, _ in _recomputed_late(program, reverse, activated))
    return frozenset(read.difference(*late))


def _recomputed_late(
    program: Program, reverse: Sequence[_Reverse], activated: bool
) -> list[tuple[Operation, int]]:
    """The cheap operations to run again, each with the backward before which it runs.

    Their inputs are read there or later, so they are in memory anyway; or they are read earlier,
    and stay in place of the results, which are no smaller. If products are to stay `activated`,
    operations on nothing but matrix products, such as activations, are excluded, because
    recomputing those takes time.
    """
    read = frozenset[str]().union(*(step.read for step in reverse))
    products = {name for operation in program.operations for name in operation.products}
    products = products if activated else set()
    late: list[tuple[Operation, int]] = []
    recomputed: set[str] = set()
    for operation in program.operations:
        results, inputs = set(operation.results), set(operation.activations)
        readers = [at for at, step in enumerate(reverse) if step.read & results]
        if not operation.cheap or products >= inputs or not readers:
            continue
        alive = set[str]().union(*(step.read for step in reverse[readers[0] :]))
        stay = inputs - (alive - recomputed)
        no_larger = _values(program, stay) <= _values(program, results & read)
        if stay <= read - recomputed and no_larger:
            late.append((operation, readers[0]))
            recomputed |= results
    return late


def _values(program: Program, names: Iterable[str]) -> int:
    """How many values these have, for each token where tokens are an axis."""
    return sum(math.prod(int(n) for n in program.values[name] if n != T) for name in names)


def _with_frees(
    uses: Sequence[_Use], survivors: set[str], statistics: bool
) -> tuple[Instruction, ...]:
    """The uses as instructions, each with the values that are freed after it.

    `statistics` says whether forwards compute these values, as they do if a backward follows.
    """
    last: dict[str, int] = {}
    frees: list[list[str]] = [[] for _ in uses]
    made_besides = [
        use.operation.statistics if statistics and not use.backward else () for use in uses
    ]
    for position, use in enumerate(uses):
        made = tuple(map(gradient_of, use.wanted)) if use.backward else use.wanted
        made = (*made, *made_besides[position])
        for name in made:
            if not use.backward and name in last:  # freed in between, since it is recomputed here
                frees[last[name]].append(name)
        last.update(dict.fromkeys((*made, *use.read), position))
    for name, position in last.items():
        if name not in survivors:
            frees[position].append(name)
    return tuple(
        Instruction(use.backward, use.operation, use.wanted, besides, tuple(sorted(dead)))
        for use, besides, dead in zip(uses, made_besides, frees, strict=True)
    )


def _with_shared(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The same instructions, with the gradients that share one array filled in as `same`."""
    array: dict[str, object] = {}
    filled = []
    for instruction in instructions:
        if instruction.backward and instruction.operation.shared_gradients:
            instruction = replace(instruction, same=tuple(_shared(instruction, array)))
        elif instruction.backward:
            array.update((gradient_of(name), object()) for name in instruction.wanted)
            instruction = replace(instruction, same=("",) * len(instruction.wanted))
        filled.append(instruction)
    return tuple(filled)


def _shared(instruction: Instruction, array: dict[str, object]) -> Iterator[str]:
    """For each wanted gradient the name whose array it shares, or ""; updates `array`.

    If two gradients share one array, and both are added to another shared array, the sums share one
    array too.
    """
    operation = instruction.operation
    names = [gradient_of(name) for name in operation.results]
    source = {name: array.setdefault(name, object()) for name in names}
    holder = {array_id: name for name, array_id in source.items()}
    for name, same in zip(operation.gradients, operation.shared_gradients, strict=True):
        source[name] = source[same] if same else object()
    sums: dict[tuple[object, object], object] = {}
    for name in instruction.wanted:
        before, result = array.get(gradient_of(name)), source[name]
        if before is not None:
            result = sums.setdefault((before, result), object())
        yield holder.get(result, "")
        holder.setdefault(result, gradient_of(name))
        array[gradient_of(name)] = result
