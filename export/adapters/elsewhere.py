"""An adapter by the modules of transformers, where mlx-lm has split, joined or renamed them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from export.adapters.adapter import Adapter
from export.sources.origins import origins_in
from export.sources.source import Origin
from export.stored import F32

_WEIGHT = ".weight"
# parts of names that transformers (5.24) changes as it loads the checkpoints of a family
_LOADED_AS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "exaone": (
        ("transformer.h.", "model.layers."),
        *((".attn.attention.out_", ".self_attn.o_"), (".attn.attention.", ".self_attn.")),
        *((".c_fc_0", ".gate_proj"), (".c_fc_1", ".up_proj"), (".mlp.c_proj", ".mlp.down_proj")),
    ),
    "granitemoe": ((".router.layer", ".router"),),
    **dict.fromkeys(("minimax", "mixtral"), ((".block_sparse_moe.", ".mlp."),)),
}


class Term(NamedTuple):
    """What an adapter adds to a module of transformers: A (in, n r) and B (n r, out).

    Where n of our matrices are rows of the module's, their terms lie side by side in A, and each
    at its rows in B, which is 0 elsewhere. With `transposed` the module stores its weight as
    (in, out). PEFT adapts a `parameter` by the weight's name: those of routers, which are no linear
    layers in transformers, and of modules whose names it takes for those of experts.
    """

    a: F32
    b: F32
    transposed: bool = False
    parameter: bool = False


def terms_elsewhere(adapter: Adapter, what: str) -> dict[str, Term]:
    """An adapter's terms by the names of transformers' modules.

    Of an own matrix that is joined of several, each has the same A, and its rows of B. For `what`
    and the errors see `origins_in`.
    """
    manifest = adapter.manifest
    origins, renames = origins_in(manifest.provenance, what), _LOADED_AS.get(manifest.family, ())
    routers, of_experts = _routers(adapter), manifest.expert_names
    pieces: dict[str, list[tuple[Origin, F32, F32, bool]]] = {}
    for own, (a, b) in adapter.modules.items():
        name, rows = f"{own}{_WEIGHT}", b.shape[1]
        start = 0
        for part in origins.get(name, (Origin(name, 0, rows, rows),)):
            module = part.name.removesuffix(_WEIGHT)
            for old, new in renames:
                module = module.replace(old, new)
            named = own in routers or module.rpartition(".")[2] in of_experts
            piece = part, a, b[:, start : start + part.rows], named
            pieces.setdefault(module, []).append(piece)
            start += part.rows
    return {module: _side_by_side(parts) for module, parts in pieces.items()}


def _side_by_side(parts: list[tuple[Origin, F32, F32, bool]]) -> Term:
    (origin, a, b, named), *others = parts
    if not others and origin.rows == origin.height:
        return Term(a, b, origin.transposed, named)
    rank = a.shape[1]
    joined: F32 = np.zeros((rank * len(parts), origin.height), np.float32)
    for number, (part, _, rows, _) in enumerate(parts):
        top = number * rank
        joined[top : top + rank, part.first : part.first + part.rows] = rows
    return Term(np.concatenate([a for _, a, _, _ in parts], axis=1), joined, origin.transposed)


def _routers(adapter: Adapter) -> set[str]:
    """The adapted matrices with a row for each expert, beside the experts."""
    manifest, found = adapter.manifest, set()
    for block in manifest.layers:
        for operation in manifest.block_types[block.type].operations:
            if not operation.experts:
                continue
            beside = operation.matrices(str)[0].rsplit(".", 2)[0]
            for name in manifest.adapted(block):
                rows = manifest.matrices[block.tensor(name)].rows
                if name.startswith(f"{beside}.") and rows == operation.experts:
                    found.add(block.tensor(name))
    return found
