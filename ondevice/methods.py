"""The training methods by name: where each one's code is, and what a comparison tries for it.

The names stand here and nowhere else: what code has to know of a method it asks of the module that
METHODS names, or of a table such as SEARCHES. The order is that of tables and plots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

METHODS: dict[str, str] = {
    "mebp": "runtime.methods.mebp",
    "mezo": "runtime.methods.mezo",
}


@dataclass(frozen=True)
class Search:
    """What `ondevice compare` does with a method where nothing else is asked for.

    `values` are training options with the values to try, every combination of them;
    `sweep_steps` is how long each is tried; `most_steps` bounds a run that nothing but a target
    loss would end.
    """

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sweep_steps: int = 20
    most_steps: int = 1_000


# most_steps: how long the methods are trained in Figure 1 of MeBP's paper
SEARCHES: dict[str, Search] = {
    "mebp": Search({"learning_rate": (1e-4, 3e-4, 1e-3)}, 20, 1_000),
    "mezo": Search({"learning_rate": (1e-5, 3e-5, 1e-4), "epsilon": (1e-3,)}, 100, 100_000),
}
