"""The parts of the package `bfcl-eval` in use: its version, questions, answers and checker.

The package requires the libraries of every model provider, and pins NumPy below the version that
this project needs, so it is installed without its requirements. The checker of calls needs none of
them: all it takes from the registry of models is whether a model writes "_" for "." in the names of
functions. Here none does, and a registry that says so stands in for the package's own while it is
imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from runtime.core.documents import from_json
from runtime.core.errors import DataError

INSTALL = "pip install --no-deps 'bfcl-eval>=2026.3.23,<2027'"
NON_LIVE = ("simple_python", "multiple", "parallel", "parallel_multiple")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
REFUSALS = ("irrelevance", "live_irrelevance")  # right is an answer without a call
RELEVANCE = ("live_relevance",)  # right is any call
CATEGORIES = (*NON_LIVE, *LIVE, *REFUSALS, *RELEVANCE)
"""The categories that are supported: all of a single turn whose functions are in Python."""

Calls = list[dict[str, Any]]
"""Calls as the checker takes them: {name: {argument: value}} each."""

_MODEL = "ondevice"
_REGISTRY = "bfcl_eval.constants.model_config"
_CHECKER = "bfcl_eval.eval_checker.ast_eval.ast_checker"


@dataclass(frozen=True)
class Question:
    """A question of the leaderboard.

    `messages` have a role and content each, and `functions` are declared as in the leaderboard's
    data. `answers` are the right calls, {name: {argument: [values that are right]}} each; there
    are none where a call is not judged, or none is wanted.
    """

    name: str
    category: str
    messages: list[dict[str, str]]
    functions: list[dict[str, Any]]
    answers: list[dict[str, dict[str, list[Any]]]]


def version() -> str:
    """The version of the package. Raises DataError where it is not installed."""
    try:
        return metadata.version("bfcl-eval")
    except metadata.PackageNotFoundError:
        raise DataError(
            f"the questions and the checker of the leaderboard are missing: {INSTALL} (without its "
            "requirements, of which none is used here)"
        ) from None


def questions(category: str) -> list[Question]:
    """The questions of a category, in the leaderboard's order.

    Raises:
        DataError: the package is missing or not of a version that is known, or there is no such
            category.
    """
    if category not in CATEGORIES:
        raise DataError(f"no category {category!r}; known are {', '.join(CATEGORIES)}")
    folder = _folder() / "data"
    name = f"BFCL_v4_{category}.json"
    answers: dict[str, Any] = {}
    if category not in REFUSALS + RELEVANCE:
        answers = {
            answer["id"]: answer["ground_truth"]
            for answer in _lines(folder / "possible_answer" / name)
        }
    listed = []
    for row in _lines(folder / name):
        (messages,) = row["question"]  # one turn
        known = answers.get(row["id"], [])
        listed.append(Question(row["id"], category, messages, row["function"], known))
    return listed


def load() -> None:
    """Import the checker: the memory that it needs is taken from then on.

    Raises:
        DataError: the package is missing, or has no such checker.
    """
    _checker()


def check(question: Question, calls: Calls) -> list[str]:
    """The faults of calls by the leaderboard's checker; empty where they are right.

    Raises whatever the checker raises, which trusts that calls are well formed.
    """
    result = _checker()(
        question.functions, calls, question.answers, _language(), question.category, _MODEL
    )
    return [] if result["valid"] else [str(error) for error in result["error"]]


def _folder() -> Path:
    version()
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"bfcl-eval is installed without its files; install it again: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def _lines(file: Path) -> list[Any]:
    try:
        return [from_json(line) for line in file.read_bytes().splitlines() if line.strip()]
    except (OSError, ValueError) as problem:
        raise DataError(
            f"bfcl-eval {version()} has no readable {file.name} ({problem}); install a version "
            f"with the data of BFCL v4: {INSTALL}"
        ) from None


@cache
def _checker() -> Callable[..., dict[str, Any]]:
    version()
    try:
        with _registry():
            checker: Callable[..., dict[str, Any]] = import_module(_CHECKER).ast_checker
    except (ImportError, AttributeError) as problem:
        raise DataError(
            f"the checker of bfcl-eval {version()} cannot be imported ({problem}); install a "
            f"version that is known: {INSTALL}"
        ) from None
    return checker


def _language() -> Any:
    return import_module("bfcl_eval.constants.enums").Language.PYTHON


@contextmanager
def _registry() -> Iterator[None]:
    """A registry of one model, which writes names of functions as they are declared."""
    module = ModuleType(_REGISTRY)
    vars(module)["MODEL_CONFIG_MAPPING"] = {_MODEL: SimpleNamespace(underscore_to_dot=False)}
    before = sys.modules.get(_REGISTRY)
    sys.modules[_REGISTRY] = module
    try:
        yield
    finally:
        del sys.modules[_REGISTRY]
        if before is not None:
            sys.modules[_REGISTRY] = before
