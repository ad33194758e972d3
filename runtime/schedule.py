"""The order in which a program's steps run, and when each value dies. Pure: no MLX.

The forward schedule is the program itself. The backward schedule of a block first recomputes the
values that its backward needs (and no others), then runs the steps' backwards in reverse; a step
whose inputs need no gradient is left out. Where there is memory for it, the forward keeps those
values instead; only what is inside a `tiled` step is always recomputed. Gradients are named
`~value`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ondevice.manifest import Kind, Step


@dataclass(frozen=True)
class Op:
    """One step, run forward or backward.

    `wanted` are the outputs to compute (forward) or the values to return gradients for
    (backward); `frees` are the values and gradients that die with this op.
    """

    backward: bool
    step: int
    wanted: tuple[str, ...]
    frees: tuple[str, ...]


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


def forward_schedule(kind: Kind) -> tuple[Op, ...]:
    """All steps up to the head's, in order; only the output survives."""
    steps = [step for step in kind.steps if step.op != "head"]
    reads = [(i, activations(step), outputs(step)) for i, step in enumerate(steps)]
    return _with_frees([(False, i, made, used) for i, used, made in reads], {kind.output})


def needs_gradient(kind: Kind, adapted: frozenset[str], input_too: bool) -> frozenset[str]:
    """The values whose gradients lead to an adapter (or to the block's input, where wanted)."""
    needy = {kind.input} if input_too else set()
    for step in kind.steps:
        if any(name in needy for name in activations(step)):
            needy |= set(outputs(step))
        needy |= {linear.output for linear in step.linears if linear.name in adapted}
        if step.op == "tiled" and learns(step, adapted):
            needy |= set(step.outputs)
    return frozenset(needy)


Reverse = list[tuple[int, tuple[str, ...], set[str]]]  # step, gradients wanted, values read


def _reverse(kind: Kind, adapted: frozenset[str], input_too: bool) -> Reverse:
    needy = needs_gradient(kind, adapted, input_too)
    reverse: Reverse = []
    for index in reversed(range(len(kind.steps))):
        step = kind.steps[index]
        if step.op in ("head", "embedding") or not set(outputs(step)) & needy:
            continue
        used = _read_by_backward(step, adapted)
        targets = tuple(name for name in activations(step) if name in needy)
        if targets or learns(step, adapted):
            reverse.append((index, targets, used))
    return reverse


def kept_values(kind: Kind, adapted: frozenset[str], input_too: bool) -> frozenset[str]:
    """What the backward reads of the forward, without the block's input."""
    read = set().union(*(used for _, _, used in _reverse(kind, adapted, input_too)))
    return frozenset(read - {kind.input})


def keeping_schedule(kind: Kind, adapted: frozenset[str], input_too: bool) -> tuple[Op, ...]:
    """The forward, after which the output and `kept_values` survive."""
    ops = [(False, i, outputs(step), activations(step)) for i, step in enumerate(kind.steps)]
    return _with_frees(ops, {kind.output, *kept_values(kind, adapted, input_too)}, kind)


def backward_schedule(
    kind: Kind, adapted: frozenset[str], input_too: bool, kept: bool = False
) -> tuple[Op, ...]:
    """Recompute, then reverse. `~output` is given; `~input` is left where `input_too`.

    With `kept`, the values that `keeping_schedule` leaves are given too, and only the reverse runs.
    """
    reverse = _reverse(kind, adapted, input_too)
    needed = set().union(*(used for _, _, used in reverse))
    if kept:
        needed = set()
    recompute: list[tuple[bool, int, tuple[str, ...], tuple[str, ...]]] = []
    for index in reversed(range(len(kind.steps))):
        step = kind.steps[index]
        made = tuple(name for name in outputs(step) if name in needed)
        if step.op == "attention" and lse(step) in needed:
            made = outputs(step)
        if made:
            recompute.append((False, index, made, activations(step)))
            needed |= set(activations(step))
    ops = recompute[::-1]
    for index, targets, used in reverse:
        cotangents = {f"~{name}" for name in outputs(kind.steps[index])}
        ops.append((True, index, targets, tuple(used | cotangents)))
    return _with_frees(ops, {f"~{kind.input}"}, kind)


def _read_by_backward(step: Step, adapted: frozenset[str]) -> set[str]:
    if step.op == "glue":
        return {name for name in step.vjp_inputs if name[0] not in "@~"}
    if step.op == "attention":
        return {*step.inputs, step.outputs[0], lse(step)}
    if step.op == "tiled":
        return set(step.inputs)  # from which a tile is recomputed
    return set(step.inputs) if learns(step, adapted) else set()


def _with_frees(
    ops: Iterable[tuple[bool, int, tuple[str, ...], tuple[str, ...]]],
    survivors: set[str],
    kind: Kind | None = None,
) -> tuple[Op, ...]:
    listed = list(ops)
    last: dict[str, int] = {}
    for position, (backward, index, wanted, used) in enumerate(listed):
        made = tuple(f"~{name}" for name in wanted) if backward else wanted
        if kind is not None and not backward and kind.steps[index].op == "attention":
            made = (*made, lse(kind.steps[index]))
        for name in (*made, *used):
            last[name] = position
    frees: list[list[str]] = [[] for _ in listed]
    for name, position in last.items():
        if name not in survivors:
            frees[position].append(name)
    return tuple(
        Op(backward, index, wanted, tuple(sorted(dead)))
        for (backward, index, wanted, _), dead in zip(listed, frees, strict=True)
    )
