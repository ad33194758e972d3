"""The leaderboard's data and checker: what is supported, and that right answers are right."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from harness.tasks.bfcl import package
from harness.tasks.bfcl.calls import read
from harness.tasks.bfcl.package import CATEGORIES, LIVE, NON_LIVE, REFUSALS, RELEVANCE
from harness.tasks.bfcl.prompt import completion_of, prompt_of, right_calls
from runtime.core.errors import DataError

COUNTS = (400, 200, 200, 200, 258, 1053, 16, 24, 240, 884, 16)
# questions whose answers no call can give: they list arguments that are not declared, or no value
UNANSWERABLE = {
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}


@pytest.fixture
def installed() -> None:
    pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("category", "count"), [*zip(CATEGORIES, COUNTS, strict=True)])
def test_written_answers_are_right_by_the_checker(category: str, count: int) -> None:
    """Of every question, the completion that is learnt, read as an answer is."""
    questions = package.questions(category)
    assert len(questions) == len({one.name for one in questions}) == count
    wrong = set()
    for question in questions:
        calls = read(completion_of(question))
        assert calls == right_calls(question)
        if category in REFUSALS + RELEVANCE:
            assert calls == [] and not question.answers
        elif package.check(question, calls):
            wrong.add(question.name)
    assert wrong == {name for name in UNANSWERABLE if name.startswith(f"{category}_")}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("category", NON_LIVE + LIVE)
def test_other_answers_are_not(category: str) -> None:
    for question in package.questions(category)[:15]:
        calls = right_calls(question)
        assert package.check(question, [])
        assert package.check(question, [*calls, calls[0]])
        ((name, arguments),) = calls[-1].items()
        assert package.check(question, [*calls[:-1], {f"{name}_": arguments}])
        assert package.check(question, [*calls[:-1], {name: {**arguments, "no such": 1}}])


def texts_of(value: Any) -> list[str]:
    """All texts and keys in a declaration."""
    if isinstance(value, dict):
        return [text for key, one in value.items() if key != "optional" for text in texts_of(one)]
    if isinstance(value, list):
        return [text for one in value for text in texts_of(one)]
    return [value] if isinstance(value, str) else []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("category", NON_LIVE + LIVE[:1])
def test_prompts_hold_all_that_is_declared(category: str) -> None:
    for question in package.questions(category):
        prompt = " ".join(prompt_of(question).replace("\\n", " ").split())
        for function in question.functions:
            properties = function["parameters"]["properties"]
            for text in [function["name"], function["description"], *properties]:
                assert " ".join(text.split()) in prompt
            for text in texts_of(properties):
                plain = " ".join(text.replace('"', '\\"').replace("\n", " ").split())
                assert plain in prompt or " ".join(text.split()) in prompt, (question.name, text)


@pytest.mark.usefixtures("installed")
def test_the_stand_in_for_the_registry_is_taken_back() -> None:
    question = package.questions("simple_python")[0]
    assert package.check(question, right_calls(question)) == []
    assert "bfcl_eval.constants.model_config" not in sys.modules


def test_without_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise package.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package.metadata, "version", absent)
    with pytest.raises(DataError, match="pip install --no-deps 'bfcl-eval"):
        package.questions("multiple")
    with pytest.raises(DataError, match="no category 'simple_java'; known are simple_python"):
        package.questions("simple_java")
