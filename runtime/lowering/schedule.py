"""The order in which a program's steps run, and when each value dies. Pure: no MLX.

The forward schedule is the program itself. The backward schedule of a block first recomputes the
values that its backward needs (and no others), then runs the steps' backwards in reverse; a step
whose inputs need no gradient is left out. Where there is memory for it, the forward keeps those
values instead; only what is inside a `tiled` step is always recomputed. What a norm or a
transposition makes of inputs that wait for their own backward is made again where it is read.
Gradients are named `~value`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ondevice.bundle.manifest import BlockType, Step


@dataclass(frozen=True)
class Op:
    """One step, run forward or backward.

    `wanted` are the outputs to compute (forward) or the values to return gradients for
    (backward); `frees` are the values and gradients that die with this op. `same` is for each
    wanted gradient the cotangent or the earlier one whose array it is after the op, or "".
    """

    backward: bool
    step: int
    wanted: tuple[str, ...]
    frees: tuple[str, ...]
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Use:
    """An op before it is known what dies with it, and the values and gradients that it reads."""

    backward: bool
    step: int
    wanted: tuple[str, ...]
    used: tuple[str, ...]


def lse(step: Step) -> str:
    """The name of an attention step's log-sum-exp."""
    return f"{step.outputs[0]}.lse"


def outputs(step: Step) -> tuple[str, ...]:
    return (*step.outputs, *(linear.output for linear in step.linears))


def learns(step: Step, adapted: frozenset[str]) -> bool:
    """Whether adapters are trained in a step."""
    return any(linear.name in adapted for linear in step.linears) or any(
        learns(inner, adapted) for inner in step.steps
    )


def activations(step: Step) -> tuple[str, ...]:
    return tuple(name for name in step.inputs if not name.startswith("@"))


def forward_schedule(block_type: BlockType) -> tuple[Op, ...]:
    """All steps up to the head's, in order; only the output survives."""
    steps = [step for step in block_type.steps if step.op != "head"]
    ops = [_Use(False, i, outputs(step), activations(step)) for i, step in enumerate(steps)]
    return _with_frees(ops, {block_type.output})


def needs_gradient(
    block_type: BlockType, adapted: frozenset[str], input_too: bool
) -> frozenset[str]:
    """The values whose gradients lead to an adapter (or to the block's input, where wanted)."""
    needy = {block_type.input} if input_too else set()
    for step in block_type.steps:
        if any(name in needy for name in activations(step)):
            needy |= set(outputs(step))
        needy |= {linear.output for linear in step.linears if linear.name in adapted}
        if step.op == "tiled" and learns(step, adapted):
            needy |= set(step.outputs)
    return frozenset(needy)


Reverse = list[tuple[int, tuple[str, ...], set[str]]]  # step, gradients wanted, values read


def _reverse(block_type: BlockType, adapted: frozenset[str], input_too: bool) -> Reverse:
    needy = needs_gradient(block_type, adapted, input_too)
    reverse: Reverse = []
    for index in reversed(range(len(block_type.steps))):
        step = block_type.steps[index]
        if step.op in ("head", "embedding") or not set(outputs(step)) & needy:
            continue
        used = _read_by_backward(step, adapted)
        targets = tuple(name for name in activations(step) if name in needy)
        if targets or learns(step, adapted):
            reverse.append((index, targets, used))
    return reverse


def kept_values(block_type: BlockType, adapted: frozenset[str], input_too: bool) -> frozenset[str]:
    """What the backward reads of the forward and does not make again, without the block's input."""
    return _waiting(block_type, _reverse(block_type, adapted, input_too)) - {block_type.input}


def keeping_schedule(
    block_type: BlockType, adapted: frozenset[str], input_too: bool
) -> tuple[Op, ...]:
    """The forward, after which the output and `kept_values` survive."""
    ops = [
        _Use(False, i, outputs(step), activations(step)) for i, step in enumerate(block_type.steps)
    ]
    return _with_frees(
        ops, {block_type.output, *kept_values(block_type, adapted, input_too)}, block_type
    )


def backward_schedule(
    block_type: BlockType, adapted: frozenset[str], input_too: bool, kept: bool = False
) -> tuple[Op, ...]:
    """Recompute, then reverse. `~output` is given; `~input` is left where `input_too`.

    With `kept`, the values that `keeping_schedule` leaves are given too, and only the reverse runs.
    """
    reverse = _reverse(block_type, adapted, input_too)
    again = _made_again(block_type, reverse)
    ops = [] if kept else _recompute(block_type, _waiting(block_type, reverse))
    for position, (index, targets, used) in enumerate(reverse):
        for made in (made for made, before in again.items() if before == position):
            step = block_type.steps[made]
            ops.append(_Use(False, made, outputs(step), activations(step)))
        cotangents = {f"~{name}" for name in outputs(block_type.steps[index])}
        ops.append(_Use(True, index, targets, tuple(used | cotangents)))
    return _with_shared(_with_frees(ops, {f"~{block_type.input}"}, block_type), block_type)


def _recompute(block_type: BlockType, needed: frozenset[str]) -> list[_Use]:
    """The steps that lead from the block's input to the values needed."""
    wanted = set(needed)
    ops: list[_Use] = []
    for index in reversed(range(len(block_type.steps))):
        step = block_type.steps[index]
        made = tuple(name for name in outputs(step) if name in wanted)
        if step.op == "attention" and lse(step) in wanted:
            made = outputs(step)
        if made:
            ops.append(_Use(False, index, made, activations(step)))
            wanted |= set(activations(step))
    return ops[::-1]


def _waiting(block_type: BlockType, reverse: Reverse) -> frozenset[str]:
    """The values that the reverse reads and does not make again."""
    read = set().union(*(used for _, _, used in reverse))
    return frozenset(
        read.difference(*(outputs(block_type.steps[i]) for i in _made_again(block_type, reverse)))
    )


def _made_again(block_type: BlockType, reverse: Reverse) -> dict[int, int]:
    """The glue to run again, and before which position of the reverse.

    Its inputs are read there or later, so that they are alive anyway; what is made of matrix
    products alone, as an activation, takes time, and waits.
    """
    products = {linear.output for step in block_type.steps for linear in step.linears}
    again: dict[int, int] = {}
    remade: set[str] = set()
    for index, step in enumerate(block_type.steps):
        readers = [at for at, (_, _, used) in enumerate(reverse) if used & set(outputs(step))]
        if step.op != "elementwise" or products >= set(activations(step)) or not readers:
            continue
        alive = set().union(*(used for _, _, used in reverse[readers[0] :])) - remade
        if alive >= set(activations(step)):
            again[index] = readers[0]
            remade |= set(outputs(step))
    return again


def _read_by_backward(step: Step, adapted: frozenset[str]) -> set[str]:
    if step.op == "elementwise":
        return {name for name in step.vjp_inputs if name[0] not in "@~"}
    if step.op == "attention":
        return {*step.inputs, step.outputs[0], lse(step)}
    if step.op == "tiled":
        return set(step.inputs)  # from which a tile is recomputed
    return set(step.inputs) if learns(step, adapted) else set()


def _with_frees(
    ops: Sequence[_Use], survivors: set[str], block_type: BlockType | None = None
) -> tuple[Op, ...]:
    last: dict[str, int] = {}
    frees: list[list[str]] = [[] for _ in ops]
    for position, op in enumerate(ops):
        made = tuple(f"~{name}" for name in op.wanted) if op.backward else op.wanted
        if (
            block_type is not None
            and not op.backward
            and block_type.steps[op.step].op == "attention"
        ):
            made = (*made, lse(block_type.steps[op.step]))
        for name in made:
            if not op.backward and name in last:  # made again: gone until then
                frees[last[name]].append(name)
        last.update(dict.fromkeys((*made, *op.used), position))
    for name, position in last.items():
        if name not in survivors:
            frees[position].append(name)
    return tuple(
        Op(op.backward, op.step, op.wanted, tuple(sorted(dead)))
        for op, dead in zip(ops, frees, strict=True)
    )


def _with_shared(ops: Sequence[Op], block_type: BlockType) -> tuple[Op, ...]:
    """The same ops, which know the gradients that are one array."""
    array: dict[str, object] = {}
    found = []
    for op in ops:
        step = block_type.steps[op.step]
        if op.backward and step.vjp_same:
            op = replace(op, same=tuple(_shared(op, step, array)))
        elif op.backward:
            array.update((f"~{name}", object()) for name in op.wanted)
            op = replace(op, same=("",) * len(op.wanted))
        found.append(op)
    return tuple(found)


def _shared(op: Op, step: Step, array: dict[str, object]) -> Iterator[str]:
    """For each wanted gradient the one whose array it is; `array` knows it from then on.

    Two results that are one array, added to one array, are one array again.
    """
    source = {f"~{name}": array.setdefault(f"~{name}", object()) for name in step.outputs}
    holder = {one: name for name, one in source.items()}
    for name, same in zip(step.vjp_outputs, step.vjp_same, strict=True):
        source[name] = source[same] if same else object()
    sums: dict[tuple[object, object], object] = {}
    for name in op.wanted:
        before, result = array.get(f"~{name}"), source[name]
        if before is not None:
            result = sums.setdefault((before, result), object())
        yield holder.get(result, "")
        holder.setdefault(result, f"~{name}")
        array[f"~{name}"] = result
