"""An adapter by the modules of transformers, where mlx-lm has split, joined or renamed them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from export.adapters.adapter import Adapter
from export.stored import F32
from runtime.adapters.origins import Origin, elsewhere


class Term(NamedTuple):
    """What an adapter adds to a module of transformers: A (in, n r) and B (n r, out).

    Where n of our matrices are rows of the module's, their terms lie side by side in A, and each
    at its rows in B, which is 0 elsewhere. With `transposed` the module stores its weight as
    (in, out). PEFT adapts a `parameter` by the weight's name: those of routers, which are no linear
    layers in transformers, and of modules whose names it takes for those of experts. A and B of a
    `lookup`, an embedding, are (V, n r) and (n r, D).
    """

    a: F32
    b: F32
    transposed: bool = False
    parameter: bool = False
    lookup: bool = False


def terms_elsewhere(adapter: Adapter, output: str) -> dict[str, Term]:
    """An adapter's terms by the names of transformers' modules.

    Of an own matrix that is joined of several, each has the same A, and its rows of B. For `output`
    and the errors see `runtime.adapters.origins.origins_in`.
    """
    manifest = adapter.manifest
    routers, of_experts = _routers(adapter), manifest.expert_names
    pieces: dict[str, list[tuple[Origin, F32, F32, bool]]] = {}
    looked_up: set[str] = set()
    rows = {own: manifest.matrices[own].rows for own in adapter.modules}
    for own, parts in elsewhere(manifest.family, manifest.provenance, rows, output).items():
        a, b = adapter.modules[own]
        a, b = (b.T, a.T) if own == adapter.lookup else (a, b)
        start = 0
        for module, part in parts:
            named = own in routers or module.rpartition(".")[2] in of_experts
            piece = part, a, b[:, start : start + part.rows], named
            pieces.setdefault(module, []).append(piece)
            looked_up |= {module} if own == adapter.lookup else set()
            start += part.rows
    terms = {module: _side_by_side(parts) for module, parts in pieces.items()}
    for module in looked_up:
        terms[module] = terms[module]._replace(
            a=terms[module].b.T, b=terms[module].a.T, lookup=True
        )
    return terms


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
    manifest, names = adapter.manifest, set()
    for block in manifest.layers:
        for operation in manifest.block_types[block.type].operations:
            if not operation.experts:
                continue
            beside = operation.matrices(str)[0].rsplit(".", 2)[0]
            for name in manifest.adapted(block):
                rows = manifest.matrices[block.tensor(name)].rows
                if name.startswith(f"{beside}.") and rows == operation.experts:
                    names.add(block.tensor(name))
    return names
