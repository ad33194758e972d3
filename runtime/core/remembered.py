"""Methods whose results an object remembers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

S = TypeVar("S")
R = TypeVar("R")
A = TypeVarTuple("A")


def remembered(method: Callable[[S, *A], R]) -> Callable[[S, *A], R]:
    """A method that is computed once for the same arguments, which cannot be given by name.

    Its object keeps the results, where `functools.cache` would keep the object too.
    """
    name = f"_remembered_{method.__name__}"

    @wraps(method)
    def result(self: S, *arguments: *A) -> R:
        known: dict[tuple[*A], R] = vars(self).setdefault(name, {})
        if arguments not in known:
            known[arguments] = method(self, *arguments)
        return known[arguments]

    return result
