"""The training methods: of each one where its code is, its options, and what a comparison tries.

Methods are named here and nowhere else. Other code asks METHODS, or the module that it names, and
does not compare names. Tables and plots show the methods in this order. The command line checks
options by this table, since the modules themselves import MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Method:
    """One method.

    `options` are those that not all methods have; methods without them refuse them. `queries` and
    `noise` are the directions of a step, and their distribution, where the options of these names
    are not given.
    """

    module: str
    options: tuple[str, ...] = ()
    search: Search = field(default_factory=Search)
    queries: int = 1
    noise: str = "gaussian"


def _perturbing(*rates: float) -> Search:
    """With as many steps as MeBP's paper trains such methods for in its Figure 1."""
    return Search({"learning_rate": rates, "epsilon": (1e-3,)}, 100, 100_000)


_PERTURBING = ("queries", "noise", "epsilon", "objective")
_AVERAGING = ("zo_optimizer", "zo_window")
_SCALING = ("zo_scaling", "zo_scaled", "zo_scaling_interval")

METHODS: dict[str, Method] = {
    "mebp": Method(
        "runtime.methods.backprop", search=Search({"learning_rate": (1e-4, 3e-4, 1e-3)})
    ),
    "mezo": Method(
        "runtime.methods.zeroth.mezo",
        (*_PERTURBING, *_AVERAGING, *_SCALING),
        _perturbing(1e-5, 3e-5, 1e-4),
    ),
    "fzoo": Method(
        "runtime.methods.zeroth.fzoo",
        _PERTURBING,
        _perturbing(3e-6, 1e-5, 3e-5),
        queries=8,
        noise="rademacher",
    ),
    "kzoo": Method(
        "runtime.methods.zeroth.kzoo",
        (*_PERTURBING, "seed_pool"),
        _perturbing(1e-5, 3e-5, 1e-4),
        queries=4,
    ),
    "one-point": Method(
        "runtime.methods.zeroth.one_point", _PERTURBING, _perturbing(1e-7, 1e-6, 1e-5)
    ),
    "hizoo": Method(
        "runtime.methods.zeroth.hizoo",
        (*_PERTURBING, "hessian_smoothing"),
        _perturbing(1e-5, 3e-5, 1e-4),
    ),
    "zo-act": Method(
        "runtime.methods.zeroth.zo_act",
        (*_PERTURBING, *_AVERAGING),
        _perturbing(3e-7, 1e-6, 3e-6),
    ),
}

USUAL = ("mebp", "mezo")
"""What comparisons and benchmarks run where no methods are named."""

_OPTIONS = dict.fromkeys(option for method in METHODS.values() for option in method.options)
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    option: tuple(name for name, method in METHODS.items() if option in method.options)
    for option in _OPTIONS
}
"""The methods that have an option which not all have."""
