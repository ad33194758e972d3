"""The training methods and the objectives: where the code of each is, and its options.

They are named here, and methods in the searches of `ondevice compare`. Other code asks METHODS and
OBJECTIVES, or the module that these name, and does not compare names. Tables and plots show the
methods in this order; the first objective is the default. The command line checks options by these
tables, since the modules themselves import MLX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Method:
    """One method.

    `options` are those that not all methods have; methods without them refuse them. `queries` and
    `noise` are the directions of a step, and their distribution, where the options of these names
    are not given. `epochs` and `steps` are the length of a run where none is given: the one or the
    other. Three epochs of a few hundred rows are too few steps for estimates from forward passes.
    `learning_rate` is the highest rate where none is given.
    """

    module: str
    options: tuple[str, ...] = ()
    epochs: float | None = None
    steps: int = 1_000
    learning_rate: float = 3e-5
    queries: int = 1
    noise: str = "gaussian"


_PERTURBING = ("queries", "noise", "epsilon")
_AVERAGING = ("zo_optimizer", "zo_window")
_SCALING = ("zo_scaling", "zo_scaled", "zo_scaling_interval")

METHODS: dict[str, Method] = {
    "mebp": Method("runtime.methods.mebp", epochs=3, learning_rate=2e-4),
    "mezo": Method("runtime.methods.zeroth.mezo", (*_PERTURBING, *_AVERAGING, *_SCALING)),
    "fzoo": Method(
        "runtime.methods.zeroth.fzoo",
        _PERTURBING,
        queries=8,
        noise="rademacher",
        learning_rate=1e-5,
    ),
    "kzoo": Method("runtime.methods.zeroth.mezo", (*_PERTURBING, "seed_pool"), queries=4),
    "one-point": Method("runtime.methods.zeroth.one_point", _PERTURBING, learning_rate=1e-6),
    "hizoo": Method("runtime.methods.zeroth.hizoo", (*_PERTURBING, "hessian_smoothing")),
    "zo-act": Method(
        "runtime.methods.zeroth.zo_act", (*_PERTURBING, *_AVERAGING), learning_rate=1e-6
    ),
}

USUAL = ("mebp", "mezo")
"""The methods of comparisons and benchmarks where none are named."""

_OPTIONS = dict.fromkeys(option for method in METHODS.values() for option in method.options)
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    option: tuple(name for name, method in METHODS.items() if option in method.options)
    for option in _OPTIONS
}
"""The methods that have an option which not all have."""


class Entry(NamedTuple):
    """The module of an objective, and the end of the sentence "training improves …"."""

    module: str
    improves: str


OBJECTIVES: dict[str, Entry] = {
    "loss": Entry("runtime.objectives.next_token", "the loss"),
    "accuracy": Entry(
        "runtime.objectives.accuracy", "the share of scored tokens that are the most likely"
    ),
    "exact": Entry(
        "runtime.objectives.exact_match",
        "the share of rows whose scored tokens all are the most likely",
    ),
    "labels": Entry(
        "runtime.objectives.labels",
        "the share of rows whose answer begins with the most likely of all labels, which are the "
        "first tokens of the training rows' answers",
    ),
}
