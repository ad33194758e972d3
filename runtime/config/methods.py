"""The training methods by name: where each one's code is, and what a comparison tries for it.

Methods are named here and nowhere else. Other code asks the module that METHODS names, or a table
such as SEARCHES, and does not compare names. Tables and plots show the methods in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

METHODS: dict[str, str] = {
    "mebp": "runtime.methods.backprop",
    "mezo": "runtime.methods.zeroth.mezo",
    "fzoo": "runtime.methods.zeroth.fzoo",
    "kzoo": "runtime.methods.zeroth.kzoo",
    "one-point": "runtime.methods.zeroth.one_point",
    "hizoo": "runtime.methods.zeroth.hizoo",
    "zo-act": "runtime.methods.zeroth.zo_act",
}

USUAL = ("mebp", "mezo")
"""What comparisons and benchmarks run where no methods are named."""

QUERIES = {"fzoo": 8, "kzoo": 4}
"""Directions per step of methods that perturb, where `--queries` is not given: 1 if not here."""

NOISE = {"fzoo": "rademacher"}
"""The distribution of the directions, where `--noise` is not given: gaussian if not here."""

_PERTURBING = ("mezo", "fzoo", "kzoo", "one-point", "hizoo", "zo-act")

OPTIONS_OF = {
    "queries": _PERTURBING,
    "noise": _PERTURBING,
    "epsilon": _PERTURBING,
    "objective": _PERTURBING,
    "zo_optimizer": ("mezo", "zo-act"),
    "zo_window": ("mezo", "zo-act"),
    "zo_scaling": ("mezo",),
    "zo_scaled": ("mezo",),
    "zo_scaling_interval": ("mezo",),
    "seed_pool": ("kzoo",),
    "hessian_smoothing": ("hizoo",),
}
"""Options that some methods only have; others refuse them."""


@dataclass(frozen=True)
class Search:
    """The defaults of `ondevice compare` for one method.

    `values` maps training options to the values to try, in every combination; each combination
    is tried for `sweep_steps` steps; `most_steps` limits a run that otherwise ends only at a
    target loss.
    """

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sweep_steps: int = 20
    most_steps: int = 1_000


# most_steps: how long the methods are trained in Figure 1 of MeBP's paper
SEARCHES: dict[str, Search] = {
    "mebp": Search({"learning_rate": (1e-4, 3e-4, 1e-3)}, 20, 1_000),
    "mezo": Search({"learning_rate": (1e-5, 3e-5, 1e-4), "epsilon": (1e-3,)}, 100, 100_000),
    "fzoo": Search({"learning_rate": (3e-6, 1e-5, 3e-5), "epsilon": (1e-3,)}, 100, 100_000),
    "kzoo": Search({"learning_rate": (1e-5, 3e-5, 1e-4), "epsilon": (1e-3,)}, 100, 100_000),
    "one-point": Search({"learning_rate": (1e-7, 1e-6, 1e-5), "epsilon": (1e-3,)}, 100, 100_000),
    "zo-act": Search({"learning_rate": (3e-7, 1e-6, 3e-6), "epsilon": (1e-3,)}, 100, 100_000),
    "hizoo": Search({"learning_rate": (1e-5, 3e-5, 1e-4), "epsilon": (1e-3,)}, 100, 100_000),
}
