"""The tensors of mlx-lm's models, and those of a checkpoint that their `sanitize` makes them of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from export.sources.source import turned
from runtime.adapters.origins import Origin
from runtime.core.errors import BundleError

_FEW = 8  # columns of the arrays that stand for tensors where there are experts


_MOST_PARTS = 4096  # of which a tensor is joined: not if every other row is taken


# transformers' names of tensors -> mlx-lm's, where its class has no `sanitize` that renames them
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt2": (("transformer.", ""),),
    "nanochat": (
        *(("model.embed_tokens.", "transformer.wte."), ("model.layers.", "transformer.h.")),
        *((f".self_attn.{letter}_proj.", f".attn.c_{letter}.") for letter in "qkv"),
        *((".self_attn.o_proj.", ".attn.c_proj."), (".fc1.", ".c_fc."), (".fc2.", ".c_proj.")),
    ),
}
# parts of names of mlx-lm's tensors -> transformers', where these are others in every checkpoint
_ELSEWHERE = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), (("model.", "transformer."),)),
    "nanochat": tuple((ours, theirs) for theirs, ours in NAMES["nanochat"]),
    "gpt_neox": (
        *(("model.h.", "gpt_neox.layers."), ("model.embed_out", "embed_out")),
        ("model.", "gpt_neox."),
    ),
}
# parts of names that are one below the other in one of transformers' tensors, with its name
_JOINED = {
    "granitemoehybrid": (
        ((".mlp.gate_proj.", ".mlp.up_proj."), ".shared_mlp.input_linear."),
        ((".mlp.down_proj.",), ".shared_mlp.output_linear."),
    ),
}
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of experts
_TRANSPOSED = ("gpt2",)  # whose matrices in layers are (in, out) in transformers


@dataclass(frozen=True)
class Made:
    """A part of a tensor that mlx-lm makes: rows of a checkpoint's, or all of it transposed.

    columns: of these rows, the first column and how many there are; None for all.
    shift: what is added to all values, as Qwen 3.5's class adds 1 to norms.
    """

    source: str
    first: int
    rows: int
    transposed: bool = False
    columns: tuple[int, int] | None = None
    shift: float = 0.0


def tensors_made(
    model: Any, shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, list[Made]]:
    """The tensors that mlx-lm's `model` makes of a checkpoint's in `sanitize`, by their names.

    Each is parts of the checkpoint's, one below the other; those of (N, R, C) are N * R rows.
    `sanitize` is run on arrays that hold the numbers of their rows and columns, which take no
    memory; where experts are stacked, the arrays have few columns. Raises BundleError where it does
    anything else than to rename tensors, to split them, to join them by rows, to transpose them,
    to add a number to a vector, and to leave some out.
    """
    import mlx.core as mx

    apart, given = _one_by_one(shapes), shapes
    stacks = {part.source for part in apart.values()}
    shapes = {name: shape for name, shape in given.items() if name not in stacks}
    shapes |= {single: (p.rows, given[p.source][-1]) for single, p in apart.items()}
    heights = [prod(shape[:-1]) if len(shape) > 1 else prod(shape) for shape in shapes.values()]
    if not hasattr(model, "sanitize"):
        whole = zip(shapes, heights, strict=True)
        return {name: [apart.get(name, Made(name, 0, rows))] for name, rows in whole}

    if any(type(module).__name__ == "SwitchLinear" for _, module in model.named_modules()):
        shapes = {
            name: (*shape[:-1], min(_FEW, shape[-1])) if len(shape) > 1 else shape
            for name, shape in shapes.items()
        }
    sizes = dict(zip(shapes, heights, strict=True))
    # vectors first: numbers to which one is added are float32, and exact up to 2^24
    in_order = sorted(shapes, key=lambda name: len(shapes[name]) > 1)
    counts = accumulate((sizes[name] for name in in_order[:-1]), initial=0)
    starts = dict(zip(in_order, counts, strict=True))

    def of_rows(name: str, shape: tuple[int, ...], rows: int) -> Any:
        numbers = mx.arange(rows) + starts[name]
        return mx.broadcast_to(
            numbers.reshape(shape if len(shape) < 2 else (*shape[:-1], 1)), shape
        )

    def of_columns(shape: tuple[int, ...]) -> Any:
        return mx.broadcast_to(mx.arange(shape[-1]), shape) if len(shape) > 1 else mx.zeros(shape)

    rows_in = {name: of_rows(name, shape, sizes[name]) for name, shape in shapes.items()}
    columns_in = {name: of_columns(shape) for name, shape in shapes.items()}
    names = {id(array): name for name, array in rows_in.items()}
    rows_out, columns_out = (_sanitized(model, arrays, where) for arrays in (rows_in, columns_in))
    made: dict[str, list[Made]] = {}
    for name, array in rows_out.items():
        source = names.get(id(array))
        if source is not None:
            made[name] = [Made(source, 0, sizes[source])]
            continue
        made[name] = _parts_of(array, columns_out[name], shapes, starts)
        if not made[name]:
            raise BundleError(f"{where}: mlx-lm rearranges {name}, which is not supported")
    return {name: [apart.get(part.source, part) for part in parts] for name, parts in made.items()}


def _one_by_one(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Made]:
    """The matrices of which transformers 5 has a stack, by the names of single experts.

    Classes know these. gpt-oss's, with biases, are read by `gpt_oss.with_experts_apart`.
    """
    singles: dict[str, Made] = {}
    for name, shape in shapes.items():
        base, _, last = name.rpartition("experts.")
        parts = _STACKS.get(last, ())
        if not parts or len(shape) != 3 or f"{name}_bias" in shapes:
            continue
        count, height, _ = shape
        rows = height // len(parts)
        for number in range(count):
            for at, part in enumerate(parts):
                single = f"{base}experts.{number}.{part}.weight"
                singles[single] = Made(name, number * height + at * rows, rows)
    return singles


def sanitized(model: Any, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the class's `sanitize` makes of tensors. Raises BundleError if it does not take them."""
    try:
        made: dict[str, Any] = model.sanitize(dict(tensors))
    except (LookupError, ValueError, TypeError, AttributeError) as e:
        of_mlx_lm = type(model).__module__.startswith("mlx_lm.")
        version = f" of mlx-lm {metadata.version('mlx-lm')}" if of_mlx_lm else ""
        complaint = f"asks for {e.args[0]}" if isinstance(e, KeyError) else f"says {e!r:.200}"
        raise BundleError(
            f"{where}: {type(model).__module__}.{type(model).__name__}{version} cannot read these "
            f"tensors: it {complaint}. A file of the checkpoint is missing or damaged, or it was "
            "saved in a form that this version does not know: download it again, or install "
            "another version of mlx-lm"
        ) from e
    return made


def _sanitized(model: Any, tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same; Gemma 3's takes the head from the model, once."""
    head = model.get("lm_head")
    made = sanitized(model, tensors, where)
    if head is not None:
        model.lm_head = head
    return made


def whole_tensors(model: Any) -> dict[str, tuple[list[str], int | None]]:
    """The checkpoint's tensors of which layers of our own class have parts, by name.

    With the parts' names, and the axis along which they are parts; None where each is the whole.
    """
    wholes: dict[str, tuple[list[str], int | None]] = (
        model.whole() if hasattr(model, "whole") else {}
    )
    return wholes


def usual_origins(
    family: str, model: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[Origin]]:
    """Where transformers has the tensors of a model, without those of the same name there.

    For sources that have no tensors of transformers, which would show it. `shapes` are those of all
    tensors of one of mlx-lm's models.
    """
    origins = {}
    for name, shape in shapes.items():
        theirs = name
        for old, new in _ELSEWHERE.get(family, ()):
            theirs = theirs.replace(old, new)
        if theirs != name:
            transposed = family in _TRANSPOSED and len(shape) == 2 and ".h." in name
            origins[name] = [Origin(theirs, 0, shape[0], shape[0], transposed)]
        for halves, joined in _JOINED.get(family, ()):
            for at, half in enumerate(halves):
                if half in name:
                    height = len(halves) * shape[0]
                    theirs = name.replace(half, joined)
                    origins[name] = [Origin(theirs, at * shape[0], shape[0], height)]
    for name, (parts, axis) in whole_tensors(model).items():
        for at, part in enumerate(parts):
            (height, *across), count = shapes[part], len(parts)
            first, whole = (at * height, count * height) if axis == 0 else (0, height)
            columns = (at * across[0], across[0], count * across[0]) if axis else None
            origins[part] = [Origin(name, first, height, whole, columns=columns)]
    return origins


def _parts_of(
    rows: Any, columns: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The parts of tensors of which an array of numbers consists; none if it is not made so."""
    if rows.ndim == 1:
        return _shifted(rows, columns, shapes, starts)
    if rows.ndim not in (2, 3):
        return []
    if rows.ndim == 3 and (filters := _filters(rows, shapes, starts)):
        return filters
    # of all matrices that are stacked, the first row
    numbers, across = np.array(rows[..., 0]).reshape(-1), np.array(columns[..., 0, :]).reshape(-1)
    if rows.ndim == 2 and rows[0, 0].item() != rows[0, -1].item():
        return _transposed(rows, columns, shapes, starts)
    width, sources = rows.shape[-1], [*starts]
    owners = np.searchsorted([*starts.values()], numbers, side="right") - 1
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(owners) != 0)) + 1
    left = int(across[0])
    if len(breaks) >= _MOST_PARTS or not (across.reshape(-1, width) - left == range(width)).all():
        return []
    parts = []
    for first, last in pairwise([0, *breaks.tolist(), len(numbers)]):
        source = sources[owners[first]]
        shape = shapes[source]
        chosen = None if shape[-1] == width else (left, width)
        if len(shape) not in (2, 3) or (chosen and len(shape) != 2) or (left and not chosen):
            return []
        rows_of = int(numbers[first]) - starts[source], last - first
        parts.append(Made(source, *rows_of, columns=chosen))
    return parts


def _shifted(
    rows: Any, columns: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The vector whose numbers these are, and what was added to it: `columns` were zeros."""
    if len(rows) < 2:  # of one number a sum looks like a product
        return []
    shift = float(columns[0].item())
    numbers = np.array(rows) - shift
    source = next((name for name, start in starts.items() if start == numbers[0]), "")
    in_order = numbers[0] + np.arange(*shapes.get(source, (0,))[:1])
    same = np.array_equal(numbers, in_order) and (np.array(columns) == shift).all()
    return [Made(source, 0, len(numbers), shift=shift)] if same else []


def _filters(
    rows: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The filters whose numbers these are; their last two axes may change places if one is 1."""
    source = next((n for n in starts if starts[n] == int(rows[0, 0, 0].item())), "")
    numbers = np.array(rows.reshape(rows.shape[0], -1))
    alike = turned(shapes.get(source, ())) == rows.shape and 1 in rows.shape[1:]
    in_order = (numbers == starts.get(source, 0) + np.arange(len(numbers))[:, None]).all()
    return [Made(source, 0, len(numbers))] if alike and in_order else []


def _transposed(
    rows: Any, columns: Any, shapes: Mapping[str, tuple[int, ...]], starts: Mapping[str, int]
) -> list[Made]:
    """The whole matrix whose numbers these are, transposed; none if there is no such matrix."""
    numbers, across = np.array(rows[0]), np.array(columns[:, 0])
    source = max((name for name in starts if starts[name] <= numbers[0]), key=starts.__getitem__)
    same = shapes[source] == (len(numbers), len(across))
    in_order = np.array_equal(numbers, starts[source] + np.arange(len(numbers)))
    if not (same and in_order and np.array_equal(across, np.arange(len(across)))):
        return []
    return [Made(source, 0, len(across), transposed=True)]
