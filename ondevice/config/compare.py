"""What `ondevice compare` is told to do: a configuration like those of `ondevice.config.base`.

Numbers that methods may have apart (steps, evaluations) are one text, "500" or
"mebp=500,mezo=4000"; every method that is compared has its number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ondevice.config.base import COUNT as _COUNT
from ondevice.config.base import FILLED as _FILLED
from ondevice.config.base import NOT_NEGATIVE as _NOT_NEGATIVE
from ondevice.config.base import Check as _Check
from ondevice.config.base import choice as _choice
from ondevice.config.base import option as _option
from ondevice.config.base import refuse as _refuse
from ondevice.config.base import required as _required
from ondevice.config.shared import BundleConfig as _BundleConfig

METHODS = ("mebp", "mezo")


def by_method(text: str) -> dict[str, int]:
    """The number that "500" or "mebp=500,mezo=4000" has for each method. Raises ValueError."""
    if text.isdecimal():
        return dict.fromkeys(METHODS, int(text))
    pairs = [part.partition("=")[::2] for part in text.replace(" ", "").split(",")]
    found = {name: int(number) for name, number in pairs}
    if len(found) < len(pairs) or not set(found) <= set(METHODS):
        raise ValueError(f"{text!r} names a method twice, or one of none of {METHODS}")
    return found


def _all_positive(text: str) -> bool:
    try:
        return min(by_method(text).values()) >= 1
    except ValueError:
        return False


_BY_METHOD = _Check(_all_positive, "1 or more for each method, such as 500 or mebp=500,mezo=4000")
_GRID = _Check(
    lambda values: bool(values) and all(a < b for a, b in pairwise((0, *values, math.inf))),
    "numbers above 0, each larger than the one before it",
)
_NAMES = _Check(
    lambda text: len({*text.split(",")} & {*METHODS}) == len(text.split(",")),
    f"some of {','.join(METHODS)}, each once",
)


@dataclass(frozen=True, kw_only=True)
class CompareConfig(_BundleConfig):
    """`ondevice compare`: methods side by side, on the same rows and under the same budget."""

    data: str = _required("a .txt or .jsonl file, a folder with train and valid, or random:SEED")
    eval_data: str | None = _option(None, "held-out data (else valid of --data)", _FILLED)
    output: str = _option("compare", "directory of the comparison", _FILLED, aliases=("-o",))
    methods: str = _option("mebp,mezo", "methods to compare", _NAMES)
    steps: str | None = _option(
        None, "steps of each method, at most: 500, or mebp=500,mezo=4000", _BY_METHOD
    )
    max_seconds: float = _option(
        0.0, "training seconds of each method, at most (0: any)", _NOT_NEGATIVE
    )
    target_loss: float = _option(
        0.0, "held-out loss at which a method is done (0: none)", _NOT_NEGATIVE
    )
    batch_size: int = _option(1, "rows per step", _COUNT)
    optimizer: str = _choice("adamw", "optimizer of mebp", "adamw", "sgd")
    eval_every: str = _option("50", "steps between evaluations, as --steps", _BY_METHOD)
    eval_rows: int = _option(0, "rows per evaluation (0: all; one if random)", _NOT_NEGATIVE)
    seed: int = _option(0, "seed of the order of rows and of the noise", _NOT_NEGATIVE)
    mebp_learning_rates: tuple[float, ...] = _option(
        (1e-4, 3e-4, 1e-3), "rates to try before mebp runs; one is taken as it is", _GRID
    )
    mezo_learning_rates: tuple[float, ...] = _option(
        (1e-5, 3e-5, 1e-4), "rates to try before mezo runs; one is taken as it is", _GRID
    )
    mezo_epsilons: tuple[float, ...] = _option(
        (1e-3,), "sizes of mezo's perturbation to try with each rate", _GRID
    )
    mezo_queries: int = _option(1, "perturbations per step of mezo", _COUNT)
    sweep_steps: str = _option("mebp=20,mezo=100", "steps of each try, as --steps", _BY_METHOD)
    sweep_rows: int = _option(0, "rows per evaluation of a try (0: as --eval-rows)", _NOT_NEGATIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            f"{name} is {text!r}; it must have a number for {method}"
            for name in ("steps", "eval_every", "sweep_steps")
            for method in self.method_names
            if (text := getattr(self, name)) and method not in by_method(text)
        ]
        if not (self.steps or self.max_seconds or self.target_loss):
            problems.append("nothing ends it: give steps, max_seconds or target_loss")
        _refuse(type(self), problems)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The methods to compare, in the order given."""
        return tuple(self.methods.split(","))
