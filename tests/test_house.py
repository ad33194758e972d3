"""The house's own rules, which no linter knows: what files may import, compare, draw and say."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import get_args

import pytest
from support.pages import PAGES
from support.source_rules import (
    PACKAGES,
    ROOT,
    calls_of_print,
    calls_of_sleep,
    classes_told_apart,
    draws_without_the_seed,
    imported_modules,
    lines_with,
    modules,
    names_among,
    names_told_apart,
    parsed,
    relative,
)

from runtime.config.methods import METHODS
from runtime.operations import attention, elementwise, gated, logits, sliced_mlp
from runtime.operations.base import Operation
from runtime.operations.program import StoredOperation

OPERATIONS: tuple[type[Operation], ...] = (
    *get_args(StoredOperation),
    gated.Gated,
    sliced_mlp.SlicedMlp,
    elementwise.Placed,
    attention.CachedAttention,
    logits.Logits,
)
NAMES = {operation.__struct_config__.tag for operation in OPERATIONS} | {*METHODS}
CLASSES = {operation.__name__ for operation in OPERATIONS}

# where names may be told apart: what defines them, kernels, and each method's own file
OWN_NAMES = (
    "runtime/operations/",
    "runtime/config/methods.py",
    *(f"{method.module.replace('.', '/')}.py" for method in METHODS.values()),
)
OWN_CLASSES = (
    "export/cut/",
    "runtime/operations/",
    "runtime/plan/",
)

# the same word for something else, and data: (file, a source text or "*" for all of it), reason
OTHER_MEANING = {
    ("runtime/run/schedule.py", "config.lr_schedule == 'linear'"): "a learning-rate schedule",
    ("export/sources/gguf_config.py", "rope_type not in _ROPE_SCALINGS"): "a scaling of positions",
    ("export/sources/gguf_config.py", "rope_type == 'linear'"): "a scaling of positions",
    ("export/sources/rope.py", "kind not in SETTINGS"): "a scaling of positions",
    ("export/fused/gguf_metadata.py", "kind not in ('linear', 'yarn')"): "a scaling of positions",
    (
        "harness/bench/mebp_tables.py",
        "*",
    ): "figures as papers print them, by the method they measured",
    ("harness/config/compare.py", "*"): "values to try; methods that it does not name have others",
}
UNSEEDED = {
    ("tests/conftest.py", "secrets.randbits(32)"): "the seed fixture itself",
    (
        "tests/oracles/whole_model.py",
        "mx.random.split(mx.array([first, last], mx.uint32), 8)",
    ): "by the key of a training's seed",
}

SLEEPING = {
    ("tests/support/waiting.py", "time.sleep(0.01)"): "between two looks",
    ("tests/faults/trial.py", "time.sleep(seconds)"): "until events that may come at any moment",
    (
        "tests/runtime/run/test_training.py",
        "time.sleep(rng.uniform(0, 0.12))",
    ): "until a kill that may come at any moment",
}

GONE = re.compile(
    r"(?<![a-z])(?:glue[ds]?|rungs?|ladders?|lent|lends?|lending|made again|in hand"
    r"|meets? (?:a|an|its|the) (?:matrix|matrices|weights?|tiles?))(?![a-z])",
    re.IGNORECASE,
)
# variables that do not say what they hold
VAGUE = {"found", "one", "it", "thing", "what", "these", "those", "some"}
# what the words are named in: this file; and recorded results are as they were measured
SAYS_GONE_WORDS = {"tests/test_house.py"}

Found = Iterator[tuple[ast.AST, str]]
Rule = Callable[[ast.Module], Found]
Exceptions = dict[tuple[str, str], str]


def refused(rules: dict[Rule, Exceptions], *folders: str) -> list[str]:
    """The places that a rule refuses, and its exceptions that no place needs."""
    places, unused = [], {(rule, *key) for rule, allowed in rules.items() for key in allowed}
    for path in modules(*folders):
        name, tree = relative(path), parsed(path.read_text())
        for rule, allowed in rules.items():
            if name.startswith(OWN.get(rule, ())):
                continue
            for node, text in rule(tree):
                keys = {(name, text), (name, "*")} & set(allowed)
                unused -= {(rule, *key) for key in keys}
                if not keys:
                    where = f"{name}:{getattr(node, 'lineno', 0)}"
                    places.append(f"{where}: {rule.__name__}: {text}")
    unneeded = sorted((name, text) for _, name, text in unused)
    return places + [f"{name}: allowed, and not there: {text}" for name, text in unneeded]


def none(places: list[str]) -> None:
    if places:
        pytest.fail("\n".join(places), pytrace=False)


def test_the_arithmetic_of_every_operation_is_kept_pure() -> None:
    """The linter's contract lists the files beside the kernels, and misses none."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    pure = next(c for c in contracts["contracts"] if c["name"].startswith("arithmetic"))
    files = {path.stem for path in (ROOT / "runtime/operations").glob("*.py")}
    kernels = {name for name in files if "kernel" in name} | {"__init__"}
    expected = {f"runtime.operations.{name}" for name in files - kernels}
    assert {name for name in pure["source_modules"] if ".operations." in name} == expected


def imports_of_tests(tree: ast.Module) -> Found:
    """No test imports another, or a conftest."""
    for module in imported_modules(tree):
        words = module.split(".")
        of_tests = words[0] == "tests" or any(
            word == "conftest" or word.startswith("test_") for word in words
        )
        if of_tests and words[:2] not in (["tests", "support"], ["tests", "oracles"]):
            yield tree, module


def names(tree: ast.Module) -> Found:
    """A new operation or method is a file and a line in a table: nobody else asks for its name."""
    return names_told_apart(tree, NAMES)


def classes(tree: ast.Module) -> Found:
    return classes_told_apart(tree, CLASSES)


def vague_names(tree: ast.Module) -> Found:
    return names_among(tree, VAGUE)


OWN: dict[Rule, tuple[str, ...]] = {names: OWN_NAMES, classes: OWN_CLASSES}


def test_tests_import_draw_and_wait_as_they_may() -> None:
    """A failure prints its seed: what is drawn without it could not be drawn again.

    On a busy machine nothing has happened by a time; what does happen can be waited for.
    """
    rules: dict[Rule, Exceptions] = {
        imports_of_tests: {},
        draws_without_the_seed: UNSEEDED,
        calls_of_sleep: SLEEPING,
    }
    none(refused(rules, "tests"))


def test_operations_and_methods_are_told_apart_where_they_belong_and_variables_are_named() -> None:
    none(refused({names: OTHER_MEANING, classes: {}, vague_names: {}}, *PACKAGES))


def test_commands_write_in_one_place() -> None:
    """There control characters of rows and names are kept from a terminal."""
    places = refused({calls_of_print: {}}, "ondevice")
    none([place for place in places if not place.startswith("ondevice/cli/screen.py:")])


def test_words_that_are_gone_do_not_come_back() -> None:
    none(
        [
            f"{relative(path)}:{number}: {line}"
            for path in [*modules(*PACKAGES, "tests"), *PAGES]
            if relative(path) not in SAYS_GONE_WORDS
            for number, line in lines_with(path.read_text(), GONE)
        ]
    )


# --- the rules themselves ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        'x == "mezo"',
        '"mebp" != x',
        'x in ("linear", "other")',
        '"head" in xs',
        'NAME = "mezo"\nx == NAME',
        'BOTH = frozenset({"mebp", "mezo"})\nx in BOTH',
        'match x:\n    case "mezo" | "other":\n        pass',
        'x.get("mezo")',
        'x["mebp"]',
        'x.startswith("mezo")',
        '{"mebp": 1, "mezo": 2}[x]',
    ],
)
def test_comparing_a_name_is_found(source: str) -> None:
    assert list(names_told_apart(parsed(source), NAMES))


@pytest.mark.parametrize(
    "source",
    ['f(method="mezo")', 'say("head")', 'x = "linear"', 'x == "mean"', '{"head": 1}', 'f"{x}head"'],
)
def test_using_a_word_is_no_comparison(source: str) -> None:
    assert not list(names_told_apart(parsed(source), NAMES))


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(x, Linear)",
        "isinstance(x, Head | SlicedMlp)",
        "isinstance(x, (int, m.Gated))",
        "type(x) is Attention",
        "match x:\n    case Linear():\n        pass",
    ],
)
def test_asking_for_a_class_is_found(source: str) -> None:
    assert list(classes_told_apart(parsed(source), CLASSES))
    assert not list(classes_told_apart(parsed("isinstance(x, Block); Linear(1)"), CLASSES))


@pytest.mark.parametrize(
    "source",
    [
        "np.random.default_rng()",
        "np.random.default_rng(0)",
        "random.random()",
        "from random import choice\nchoice(x)",
        "secrets.token_hex()",
        "mx.random.normal((3,))",
        "os.urandom(4)",
        "uuid.uuid4()",
    ],
)
def test_an_unseeded_draw_is_found(source: str) -> None:
    assert list(draws_without_the_seed(parsed(source)))


@pytest.mark.parametrize(
    "source", ["np.random.default_rng(seed)", "mx.random.key(seed + 1)", "rng.integers(3)"]
)
def test_a_seeded_draw_is_fine(source: str) -> None:
    assert not list(draws_without_the_seed(parsed(source)))


@pytest.mark.parametrize(
    "line", ["a glue graph", "test_the_ladder_is", "the tile in hand", "Rungs"]
)
def test_words_are_found_whole(line: str) -> None:
    assert list(lines_with(line, GONE))
    for fine in (
        "equivalently",
        "silent",
        "calendar",
        "talent",
        "as a user meets it",
        "in handling",
    ):
        assert not list(lines_with(fine, GONE))
