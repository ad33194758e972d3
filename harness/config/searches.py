"""The values that `ondevice compare` tries for each method where no others are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Search:
    """The defaults of `ondevice compare` for one method.

    `values` maps training options to the values to try, in every combination; each combination
    is tried for `sweep_steps` steps; `most_steps` limits a run that otherwise ends only at a
    target loss.
    """

    values: Mapping[str, tuple[float, ...]]
    sweep_steps: int = 20
    most_steps: int = 1_000


def _perturbing(*rates: float) -> Search:
    """With as many steps as MeBP's paper trains such methods for in its Figure 1."""
    return Search({"learning_rate": rates, "epsilon": (1e-3,)}, 100, 100_000)


_SEARCHES = {
    "mebp": Search({"learning_rate": (1e-4, 3e-4, 1e-3)}),
    "mezo": _perturbing(1e-5, 3e-5, 1e-4),
    "fzoo": _perturbing(3e-6, 1e-5, 3e-5),
    "kzoo": _perturbing(1e-5, 3e-5, 1e-4),
    "one-point": _perturbing(1e-7, 1e-6, 1e-5),
    "hizoo": _perturbing(1e-5, 3e-5, 1e-4),
    "zo-act": _perturbing(3e-7, 1e-6, 3e-6),
}
_OTHERS = Search({"learning_rate": (1e-5, 1e-4, 1e-3)})


def search_of(method: str) -> Search:
    """The search of a method; a method without an entry has one over a wide range of rates."""
    return _SEARCHES.get(method, _OTHERS)
