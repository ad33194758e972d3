"""Finding an objective by its name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from runtime.config.objectives import OBJECTIVES
from runtime.core.errors import UsageError
from runtime.engine.sample import NumberedRows
from runtime.objectives.protocol import Implementation, Loss, Objective


def objective_of(name: str, rows: NumberedRows | None) -> Objective:
    """The objective that `runtime.config.objectives` lists under a name, for a training on `rows`.

    Raises:
        DataError: it cannot be one of these rows.
    """
    return cast(Implementation, import_module(OBJECTIVES[name])).objective(rows)


def loss_of(name: str, rows: NumberedRows | None, method: str) -> Loss:
    """As `objective_of`, for a method that follows gradients.

    Raises:
        UsageError: the objective has none.
    """
    objective = objective_of(name, rows)
    if not isinstance(objective, Loss):
        raise UsageError(
            f"--objective {name} has no gradient, which {method} follows; give a method that needs "
            "none, such as --method mezo, or --objective loss"
        )
    return objective
