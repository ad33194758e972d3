"""Calls as text: written and read back, malformed ones, and the leaderboard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from harness.tasks.bfcl.calls import MOST_CHARACTERS, read, write

Rng = np.random.Generator
STRANGE = "a \"quote\", 'one', ünï \\ back\n\u2028 [x](y=1)"


def value_of(rng: Rng, depth: int = 0) -> Any:
    made = int(rng.integers(0, 6 if depth > 2 else 8))
    if made == 6:
        return [value_of(rng, depth + 1) for _ in range(int(rng.integers(0, 3)))]
    if made == 7:
        return {f"k{at}": value_of(rng, depth + 1) for at in range(int(rng.integers(0, 3)))}
    letters = list(STRANGE)
    text = "".join(rng.choice(letters, int(rng.integers(0, 9))))
    number = float(rng.normal()) * 10.0 ** int(rng.integers(-8, 20))
    return [text, number, int(rng.integers(-9, 99)), True, None, STRANGE][made]


def test_what_is_written_is_read(rng: Rng) -> None:
    for _ in range(200):
        calls = [
            {f"f{at}.g_{at}": {f"a{i}": value_of(rng) for i in range(int(rng.integers(0, 4)))}}
            for at in range(int(rng.integers(0, 4)))
        ]
        text = write(calls)
        assert read(text) == calls
        assert "\n" not in text  # an answer is one line
        if len(calls) == 1:
            assert read(text[1:-1]) == calls


READ = {
    "f(a=1)": [{"f": {"a": 1}}],
    " '[f(a=1, b=\"x\")]' ": [{"f": {"a": 1, "b": "x"}}],
    "[f(), g.h(x=-2.5)]": [{"f": {}}, {"g.h": {"x": -2.5}}],
    "(f(a=(1, 2)), f(a=True))": [{"f": {"a": (1, 2)}}, {"f": {"a": True}}],
    "f(a=x, b=g(), c=g(y=1))": [{"f": {"a": "x", "b": "g()", "c": {"g": {"y": 1}}}}],
    "f(a={'k': [1, None]}, b=d[0])": [{"f": {"a": {"k": [1, None]}, "b": "d[0]"}}],
    "f(a=3 * (4 - 1) / 2, b=...)": [{"f": {"a": 4.5, "b": "..."}}],
    "f(a=1, a=2, b=not True)": [{"f": {"a": 2, "b": -1}}],
    "f(1, 2)": [{"f": {}}],  # values without names do not count
    "[]": [],
}
MALFORMED = (
    "",
    "I cannot help with that.",
    "f(a=1",
    "[f(a=1), 3]",
    "{'name': 'f'}",
    "f",
    "f(a=1) and g()",
    "f(**d)",
    "f(a={**d})",
    "f(a={[1]: 2})",
    "f(a=1 / 0)",
    "f(a=lambda: 1)",
    "f(a='x' * 9)",
    "f(a=__import__('os').getpid() + 1)",
    "f(a=[x for x in y])",
    "[f(a=1)]\n[g(a=1)]",
    "f(a='\0')",
    "f(a=" + "9" * 5000 + ")",
    "f(a=" + "*".join(["9" * 900] * 3) + ")",
    "[" * 300,
    "f(a=" + "-" * 9000 + "1)",
    "f(a='" + "x" * MOST_CHARACTERS + "')",
)


@pytest.mark.parametrize("text", READ)
def test_answers_are_read(text: str) -> None:
    assert read(text) == READ[text]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:20]))
def test_malformed_answers_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def theirs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """The leaderboard's reader; what it imports for other languages is not there."""
    pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed")
    monkeypatch.setenv("BFCL_PROJECT_ROOT", str(folder))
    for name in ("tree_sitter", "tree_sitter_java", "tree_sitter_javascript", "tenacity"):
        module = ModuleType(name)
        module.__getattr__ = lambda _: lambda *a, **k: Absent()  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
    from bfcl_eval.model_handler.utils import ast_parse

    return ast_parse


class Absent:
    def __getattr__(self, name: str) -> Any:
        return lambda *a, **k: Absent()

    def __call__(self, *a: Any, **k: Any) -> Any:
        return Absent()

    def __or__(self, other: object) -> Absent:
        return self


def test_calls_are_what_the_leaderboard_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rng: Rng
) -> None:
    ast_parse = theirs(monkeypatch, tmp_path)
    for text, calls in READ.items():
        if "..." not in text:  # their reader has no such constant on every version of Python
            assert ast_parse(text) == calls, text
    for _ in range(50):
        text = write([{"f.g": {f"a{i}": value_of(rng) for i in range(3)}}])
        assert ast_parse(text) == read(text)
    for text in ("", "f(a=1", "[f(a=1), 3]", "f", "{'name': 'f'}", "f(a=[x for x in y])"):
        with pytest.raises(Exception):  # noqa: B017, they raise plain ones
            ast_parse(text)
