"""The options of `ondevice compare`.

Some options can differ between methods. They are one text: "500" is for every method, and
"mebp=500,mezo=4000" gives each method another value. Values to try are separated by colons, as in
"mebp=1e-4:3e-4".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from runtime.config.base import (
    COUNT,
    FILLED,
    NOT_NEGATIVE,
    SEED,
    Check,
    Group,
    choice,
    option,
    output_option,
    refuse,
    required,
    rise,
    up_to,
)
from runtime.config.lora import LoraOptions
from runtime.config.methods import METHODS, USUAL
from runtime.config.parallel import parallel_field
from runtime.config.shared import (
    MOST_ROWS,
    TRAIN_DATA,
    BundleConfig,
    DataOptions,
    pack_field,
    prefix_length_field,
    trainable_field,
    valid_split_field,
)
from runtime.config.train import EPSILON, LOSS, RATE
from runtime.config.zeroth_order import MOST_QUERIES


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


T = TypeVar("T")
_BY_METHOD = "VALUE|NAME=VALUE,..."
EVAL_EVERY = 50
_SWEEP_STEPS = ",".join(f"{name}={search_of(name).sweep_steps}" for name in METHODS)
SEARCHED = {"learning_rate": "learning_rates", "epsilon": "epsilons"}  # training option: ours
COUNTED = ("steps", "eval_every", "sweep_steps")
BY_METHOD = (*COUNTED, *SEARCHED.values())  # options that can differ between methods


def by_method(text: str, read: Callable[[str], T]) -> dict[str, T]:
    """The value of each method in "500" or "mebp=500,mezo=4000", converted by `read`.

    Raises:
        ValueError: a part cannot be read, a method comes twice, or there is no such method.
    """
    if "=" not in text:
        return dict.fromkeys(METHODS, read(text))
    pairs = [part.partition("=")[::2] for part in text.replace(" ", "").split(",")]
    values = {name: read(value) for name, value in pairs}
    if len(values) < len(pairs) or not set(values) <= set(METHODS):
        raise ValueError(f"{text!r} names a method twice, or none of {', '.join(METHODS)}")
    return values


def _texts(text: str | None) -> dict[str, str]:
    """The value of each method as it was typed; none where the option was not given."""
    return by_method(text, str) if text else {}


def _values(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(":")))


def _all_fit(text: str, read: Callable[[str], Any], fits: Callable[[Any], bool]) -> bool:
    try:
        return all(map(fits, by_method(text, read).values()))
    except ValueError:
        return False


_COUNTS = Check(
    lambda text: _all_fit(text, int, COUNT.allows),
    "1 or more for each method, such as 500 or mebp=500,mezo=4000",
)
_NAMES = Check(
    lambda text: len({*text.split(",")} & {*METHODS}) == len(text.split(",")),
    f"some of {','.join(METHODS)}, each once",
)


def _grids(each: Check) -> Check:
    """The condition on values to try, of which each must be allowed."""
    return Check(
        lambda text: _all_fit(
            text, _values, lambda values: all(map(each.allows, values)) and rise(values)
        ),
        "numbers above 0 for each method, each larger than the one before it, such as 1e-4:3e-4 or "
        f"mebp=1e-4:3e-4,mezo=1e-5; each {each.wanted}",
    )


def _searched(option: str) -> str:
    """The values to try for a training option, as they are typed."""
    return ",".join(
        f"{name}={':'.join(f'{value:g}' for value in search_of(name).values[option])}"
        for name in METHODS
        if option in search_of(name).values
    )


@dataclass(frozen=True, kw_only=True)
class CompareConfig(BundleConfig, LoraOptions, DataOptions):
    """The options of `ondevice compare`, which trains several methods under one budget."""

    data: str = required(TRAIN_DATA, "DATA")
    eval_data: str | None = option(
        None, "held-out data (else valid of --data)", FILLED, Group.EVALUATION, metavar="DATA"
    )
    valid_split: str | None = valid_split_field()
    output: str = output_option("compare", "directory of the comparison", "DIR")
    methods: str = option(",".join(USUAL), "methods to compare", _NAMES, metavar="NAMES")
    steps: str | None = option(
        None, "most steps of each method: 500, or mebp=500,mezo=4000", _COUNTS, metavar=_BY_METHOD
    )
    max_seconds: float = option(
        0.0, "most training seconds of each method (0: no limit)", NOT_NEGATIVE
    )
    max_forward_passes: int = option(
        0,
        "most forward passes of each method, each of one row; a row trained with backpropagation "
        "counts as three, since it is computed twice and its gradient costs about as much (0: no "
        "limit)",
        NOT_NEGATIVE,
    )
    equal: str = choice(
        "nothing",
        "give each method the same number of seconds (--max-seconds) or of forward passes "
        "(--max-forward-passes), and judge by it; without it, methods are judged by seconds",
        "nothing",
        "forward-passes",
        "seconds",
    )
    target_loss: float = option(0.0, "held-out loss at which a method is done (0: none)", LOSS)
    pack: bool = pack_field()
    batch_size: int = option(
        1, "rows per step; with --pack sequences of rows", up_to(MOST_ROWS), Group.TRAINING
    )
    trainable: str | None = trainable_field()
    prefix_length: int | None = prefix_length_field()
    optimizer: str = choice(
        "adamw", "optimizer, of methods that use one", "adamw", "sgd", group=Group.TRAINING
    )
    queries: int | None = option(
        None,
        "directions per step, of methods that perturb (default: each one's)",
        up_to(MOST_QUERIES),
        Group.ZEROTH_ORDER,
    )
    eval_every: str | None = option(
        None,
        "steps between evaluations, written as --steps (default: 50, or with --max-forward-passes "
        "so many that each method is evaluated at most 20 times)",
        _COUNTS,
        Group.EVALUATION,
        metavar=_BY_METHOD,
    )
    eval_rows: int = option(
        0, "rows per evaluation (0: all; one if random)", NOT_NEGATIVE, Group.EVALUATION
    )
    parallel: str | None = parallel_field(
        "data", processes="of each training, which are started by mpirun,"
    )
    seed: int = option(0, "seed of the order of rows and of the noise", SEED, Group.TRAINING)
    learning_rates: str = option(
        _searched("learning_rate"),
        "rates that a sweep tries before a method runs, as 1e-4:3e-4 for all or mezo=1e-6:1e-5; "
        "the better half goes on for twice as many steps, until one is left; a single rate needs "
        "no sweep; methods that are not named keep their default",
        _grids(RATE),
        Group.SWEEP,
        metavar=_BY_METHOD,
    )
    epsilons: str = option(
        _searched("epsilon"),
        "sizes of a perturbation that a sweep tries with each rate",
        _grids(EPSILON),
        Group.SWEEP,
        metavar=_BY_METHOD,
    )
    sweep_steps: str | None = option(
        None,
        "steps of each trial before the first half is left, written as --steps (default: "
        f"{_SWEEP_STEPS}; with --max-forward-passes so many that the last two go on for a quarter "
        "of the run)",
        _COUNTS,
        Group.SWEEP,
        metavar=_BY_METHOD,
    )
    sweep_rows: int = option(
        0, "rows per evaluation of a trial (0: as --eval-rows)", NOT_NEGATIVE, Group.SWEEP
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            f"{name} is {text!r}; it must have a number for {method}"
            for name in ("steps", "eval_every")
            for method in self.method_names
            if (text := getattr(self, name)) and method not in by_method(text, int)
        ]
        problems += [
            f"learning_rates is {self.learning_rates!r}; it must have values for {method}"
            for method in self.method_names
            if "learning_rate" not in self.searched(method)
        ]
        limits = ("steps", "max_seconds", "max_forward_passes", "target_loss")
        if not any(getattr(self, name) for name in limits):
            problems.append(f"nothing ends it: give {', '.join(limits[:-1])} or {limits[-1]}")
        problems += self._unequal()
        refuse(type(self), problems)

    def _unequal(self) -> list[str]:
        """Why the methods would not get the same amount of the cost that `equal` names."""
        if self.equal == "nothing":
            return []
        limit, other = "max_seconds", "max_forward_passes"
        if self.equal == "forward-passes":
            limit, other = other, limit
        problems = []
        if not getattr(self, limit):
            problems.append(f"equal is {self.equal}, but {limit} does not say how many")
        problems += [
            f"equal is {self.equal}; {name} would give the methods other amounts of them"
            for name in ("steps", other)
            if getattr(self, name)
        ]
        return problems

    @property
    def judged_by(self) -> str:
        """The cost by which methods are compared: `seconds` or `forward_passes`."""
        return "forward_passes" if self.equal == "forward-passes" else "seconds"

    @property
    def method_names(self) -> tuple[str, ...]:
        """The methods to compare, in the order given."""
        return tuple(self.methods.split(","))

    def value_of(self, name: str, method: str) -> object:
        """The value of one of BY_METHOD for a method; None where its default applies."""
        if name in COUNTED:
            text = getattr(self, name)
            return by_method(text, int).get(method) if text else None
        (option,) = (key for key, ours in SEARCHED.items() if ours == name)
        return self.searched(method).get(option)

    def with_others(self, other: CompareConfig) -> CompareConfig:
        """These options, with the methods of another comparison added and their values in it."""
        added = [method for method in other.method_names if method not in self.method_names]
        changes: dict[str, Any] = {"methods": ",".join([*self.method_names, *added])}
        for name in BY_METHOD:
            ours, theirs = (_texts(getattr(config, name)) for config in (self, other))
            kept = {method: theirs[method] for method in added if method in theirs}
            if any(ours.get(method) != text for method, text in kept.items()):
                named = {method: ours[method] for method in self.method_names if method in ours}
                changes[name] = ",".join(f"{key}={text}" for key, text in (named | kept).items())
        return replace(self, **changes)

    def searched(self, method: str) -> dict[str, tuple[float, ...]]:
        """The values that the sweep of a method tries, by training option.

        Values that name no method apply to the methods that try the option by default.
        """
        default = search_of(method).values
        values = {}
        for searched, field_name in SEARCHED.items():
            text = getattr(self, field_name)
            given = by_method(text, _values)
            if searched in default or (method in given and "=" in text):
                values[searched] = given.get(method, default.get(searched, ()))
        return values
