"""Whose the fields of a log's header are that not every log has: one line an owner.

An owner names its fields in `log_fields`, checks them in `check_fields`, and writes them. A descent
also says what follows the gradients in a step's line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from runtime.methods.full.weights import FullWeights
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Averages, Descent, Sgd
from runtime.methods.zeroth.estimator import Estimator
from runtime.methods.zeroth.hessian import HessianDescent
from runtime.methods.zeroth.layer_scales import ScaledDescent
from runtime.methods.zeroth.zo_act import Coefficients


class Owner(Protocol):
    """A class that writes fields of its own into a log's header."""

    log_fields: ClassVar[tuple[str, ...]]

    @classmethod
    def check_fields(cls, fields: Mapping[str, Any]) -> None:
        """Check its own among all fields that are not common.

        Raises:
            ValueError: one of them is missing or invalid, or cannot stand beside another's.
        """


DESCENTS: tuple[type[Descent], ...] = (Averages, HessianDescent, ScaledDescent)
ESTIMATORS: tuple[type[Estimator], ...] = (Coefficients,)
OWNERS: tuple[type[Owner], ...] = (*DESCENTS, *ESTIMATORS, Noise, FullWeights)

T = TypeVar("T", bound=type[Owner])

REMOVED = {
    "rank": "LOZO or ZO-Muon",
    "interval": "LOZO or ZO-Muon",
    "factor_decay": "LOZO-M",
    "cone_angle": "ConMeZO",
    "cone_decay": "ConMeZO",
    "flipout": "GRZO",
    "muon": "ZO-Muon",
}
"""Fields that logs of earlier versions may have, and the estimators that wrote them."""


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check all fields that are not common to every log.

    Raises:
        ValueError: a field is invalid, unknown, or of an estimator that was removed.
    """
    known = {name for owner in OWNERS for name in owner.log_fields}
    for name in fields:
        if name in REMOVED:
            raise ValueError(
                f"its header has {name!r}, and the method that writes it, {REMOVED[name]}, was "
                "removed; replay it with the version that wrote it"
            )
        if name not in known:
            raise ValueError(f"its header has an unknown field, {name!r:.80}")
    descents = _writers(DESCENTS, fields)
    if len(descents) > 1:
        names = [name for descent in descents for name in descent.log_fields if name in fields]
        raise ValueError(f"its header has fields of several descents: {', '.join(names)}")
    for owner in _writers(OWNERS, fields):
        owner.check_fields(fields)


def descent_in(fields: Mapping[str, Any]) -> type[Descent]:
    """The descent that wrote some of the fields; plain SGD, which has none, where no other did."""
    return next(iter(_writers(DESCENTS, fields)), Sgd)


def trained_in(fields: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Those of the adapters' tensors that the estimator trained."""
    estimators = _writers(ESTIMATORS, fields)
    return [name for name in tensors if all(estimator.trains(name) for estimator in estimators)]


def _writers(owners: Iterable[T], fields: Mapping[str, Any]) -> list[T]:
    """The owners of at least one of the fields."""
    return [owner for owner in owners if not fields.keys().isdisjoint(owner.log_fields)]
