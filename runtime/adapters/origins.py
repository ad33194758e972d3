"""The modules of transformers of which mlx-lm's are parts, where the two have other ones.

Only a checkpoint's own tensors show them, so that a bundle's provenance keeps them. Experts, of
which there may be thousands, have one entry for all that lie one below the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from runtime.core.errors import BundleError, UsageError

RENAMED = "renamed"  # in a provenance
WEIGHT = ".weight"
_MOST = 4096  # experts of a layer
# parts of names that transformers (5.24) changes as it loads the checkpoints of a family
_LOADED_AS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "exaone": (
        *(("transformer.h.", "model.layers."), ("transformer.wte", "model.embed_tokens")),
        *((".attn.attention.out_", ".self_attn.o_"), (".attn.attention.", ".self_attn.")),
        *((".c_fc_0", ".gate_proj"), (".c_fc_1", ".up_proj"), (".mlp.c_proj", ".mlp.down_proj")),
    ),
    "gpt_neox": (("embed_out", "lm_head"),),
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), ((".router.layer", ".router"),)),
    **dict.fromkeys(("minimax", "mixtral"), ((".block_sparse_moe.", ".mlp."),)),
}


class Origin(NamedTuple):
    """Of the `height` rows of the tensor `name` of a checkpoint, `rows` from `first` on.

    With `transposed` the checkpoint has it as (in, out), and its rows are columns there. `columns`
    are the first one, how many there are, and how many the checkpoint's has; None for all. A
    `times` above 1 stands for so many tensors, whose names have the numbers from 0 on in place of a
    star. Rows, or the columns where some are chosen, are `every` so many apart. A `stack` above 0
    says that the tensor is so many matrices, as of experts, and this is the same part of each.
    """

    name: str
    first: int
    rows: int
    height: int
    transposed: bool = False
    columns: tuple[int, int, int] | None = None
    times: int = 1
    every: int = 1
    stack: int = 0

    @property
    def each(self) -> tuple[Origin, ...]:
        """The origins that this one stands for."""
        if self.times == 1:
            return (self,)
        names = (self.name.replace("*", str(number)) for number in range(self.times))
        return tuple(self._replace(name=name, times=1) for name in names)

    @property
    def across(self) -> tuple[int, int, int]:
        """The columns, where all are one."""
        return self.columns or (0, 1, 1)

    @property
    def all_rows(self) -> int:
        """The rows of all matrices of a stack."""
        return self.rows * (self.stack or 1)


Origins = Mapping[str, tuple[Origin, ...]]


def elsewhere(
    family: str, provenance: Mapping[str, Any], rows: Mapping[str, int], output: str
) -> dict[str, list[tuple[str, Origin]]]:
    """Of each of our modules, its parts in order: transformers' modules, and which rows of these.

    `rows` are those of our modules' matrices. For `output` and the errors see `origins_in`.
    """
    origins = origins_in(provenance, output)
    parts_elsewhere: dict[str, list[tuple[str, Origin]]] = {}
    for own, count in rows.items():
        name = f"{own}{WEIGHT}"
        for part in origins.get(name, (Origin(name, 0, count, count),)):
            module = loaded_as(family, part.name.removesuffix(WEIGHT))
            parts_elsewhere.setdefault(own, []).append((module, part))
    return parts_elsewhere


def loaded_as(family: str, module: str) -> str:
    """The name that transformers has for a module of a checkpoint."""
    for old, new in _LOADED_AS.get(family, ()):
        module = module.replace(old, new)
    return module


def together(origins: list[Origin]) -> list[Origin]:
    """One origin for all of a list whose names differ by a number alone; else the list."""
    first, words = origins[0], origins[0].name.split(".")
    for at, word in enumerate(words):
        if word == "0" and len(origins) > 1:
            starred = ".".join((*words[:at], "*", *words[at + 1 :]))
            whole = first._replace(name=starred, times=len(origins))
            if list(whole.each) == origins:
                return [whole]
    return origins


def of_each(origins: list[Origin], stack: int) -> list[Origin]:
    """One origin for parts that are the same of each matrix of a stack; none if they are not.

    `origins` are parts of the tensor whose matrices lie one below the other.
    """
    height = origins[0].height // stack
    part = origins[0]._replace(height=height, stack=stack)
    if part.rows == stack * height:
        return [part._replace(rows=height)]
    alike = [origins[0]._replace(first=part.first + n * height) for n in range(stack)]
    return [part] if origins == alike else []


def origins_in(provenance: Mapping[str, Any], output: str) -> Origins:
    """The origins of a bundle's tensors, by their names here; those of the same name are left out.

    `output` is to be written, for messages.

    Raises:
        BundleError: the entry is damaged.
        UsageError: they are not all in the model.
    """
    from runtime.core.typed import as_type  # random weights, which PyTorch trains too, need none

    entry, where = provenance.get(RENAMED, {}), provenance.get("name")

    def damaged(problem: object) -> BundleError:
        return BundleError(f"{where}: its list of tensors is damaged: {problem}")

    try:
        origins = as_type(entry, dict[str, tuple[Origin, ...]])
    except ValueError as problem:
        raise damaged(problem) from None
    for part in (part for parts in origins.values() for part in parts):
        if not (1 <= part.times <= _MOST and 0 <= part.stack <= _MOST and part.every > 0):
            raise damaged(part)
    origins = {
        name: tuple(origin for p in parts for origin in p.each) for name, parts in origins.items()
    }
    whole: dict[str, set[Origin]] = {}
    for name, parts in origins.items():
        if not parts:
            raise damaged(f"{name} is from nowhere")
        for part in parts:
            whole.setdefault(part.name, set()).add(part)
    for name, pieces in whole.items():  # each once: layers may have the same tensor
        try:
            complete = _is_tiled(pieces)
        except ValueError as problem:
            raise damaged(problem) from None
        if not complete:
            raise UsageError(f"{output}: of {where}'s {name} mlx-lm has not all rows")
    return origins


def _is_tiled(parts: Iterable[Origin]) -> bool:
    """Whether parts of a tensor are all of it; raises ValueError if they cannot be its parts."""
    whole = {(p.height, p.transposed, p.across[2], p.every, p.stack) for p in parts}
    if len(whole) != 1:
        raise ValueError("parts of a tensor say different things of it")
    top, by_columns, every = 0, any(part.columns for part in parts), whole.pop()[3]
    if every > 1:
        return _is_tiled_in_turn(parts, by_columns, every)
    for part in sorted(parts, key=lambda origin: origin.across[0] if by_columns else origin.first):
        other = (part.first, part.rows, part.height) if by_columns else part.across
        first, count, end = part.across if by_columns else (part.first, part.rows, part.height)
        if count < 1 or first + count > end or first < top or other[:2] != (0, other[2]):
            raise ValueError(f"{part}")
        if first > top:
            return False
        top = first + count
    return top == end


def _is_tiled_in_turn(parts: Iterable[Origin], by_columns: bool, every: int) -> bool:
    """The same of rows, or columns, in turn: those of each remainder are a tensor of their own."""
    turns: dict[int, list[Origin]] = {}
    end = 0
    for part in parts:
        first, count, end = part.across if by_columns else (part.first, part.rows, part.height)
        turn = first % every
        first, height = first // every, -(-(end - turn) // every)
        part = part._replace(every=1)
        if by_columns:
            part = part._replace(columns=(first, count, height))
        else:
            part = part._replace(first=first, height=height)
        turns.setdefault(turn, []).append(part)
    return all(map(_is_tiled, turns.values())) and len(turns) == min(every, end)
