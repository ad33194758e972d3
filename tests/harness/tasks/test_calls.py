"""The function-calling task: one right answer per sentence, and splits that do not leak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.tasks import calls
from harness.tasks.calls import ACTIONS, SLOTS, SPLITS, Example, generate, write_jsonl

EXAMPLES = [one for split in SPLITS for one in generate(0, 600, split)]


def sentence(example: Example) -> str:
    return example.prompt.removeprefix("User: ").removesuffix("\nCall:")


def test_every_value_stands_in_its_sentence() -> None:
    for example in EXAMPLES:
        call = json.loads(example.completion)
        assert call is not None
        action = next(one for one in ACTIONS if one.name == call["name"])
        assert list(call) == ["name", "arguments"]
        assert list(call["arguments"]) == list(action.arguments)
        for name, value in call["arguments"].items():
            assert isinstance(value, int) == (action.arguments[name] in ("minutes", "percent"))
            # a slot that begins the sentence is capitalized there
            assert str(value).lower() in sentence(example).lower()


def test_examples_are_short_and_have_one_form() -> None:
    for example in EXAMPLES:
        assert example.prompt.startswith("User: ")
        assert example.prompt.endswith("\nCall:")
        assert "{" not in example.prompt
        assert example.completion.startswith(' {"name":"')
        assert "\n" not in sentence(example) + example.completion
        assert len(example.prompt.split()) <= 24
        assert len(example.prompt) + len(example.completion) < 200


def test_each_phrasing_fills_exactly_the_arguments_of_its_action() -> None:
    for action in ACTIONS:
        assert set(action.arguments.values()) <= set(SLOTS)
        assert len(action.train) >= 6
        assert len(action.test) >= 3
        for phrasing in (*action.train, *action.test):
            assert sorted(calls.slots_of(phrasing)) == sorted(action.arguments.values())


def test_a_sentence_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for example in [*EXAMPLES, *generate(1, 600, "train"), *generate(1, 600, "test")]:
        assert answers.setdefault(example.prompt, example.completion) == example.completion


def test_phrasings_of_train_and_test_are_disjoint() -> None:
    train = {phrasing for action in ACTIONS for phrasing in action.train}
    test = {phrasing for action in ACTIONS for phrasing in action.test}
    assert len(train) == sum(len(action.train) for action in ACTIONS)
    assert not train & test
    seen = {one.prompt for split in ("train", "valid") for one in generate(5, 2000, split)}
    assert not seen & {one.prompt for one in generate(5, 2000, "test")}


def test_every_run_of_examples_has_every_action_once() -> None:
    names = [json.loads(one.completion)["name"] for one in generate(3, 3 * len(ACTIONS), "train")]
    turns = [names[at : at + len(ACTIONS)] for at in range(0, len(names), len(ACTIONS))]
    assert all(sorted(turn) == sorted(action.name for action in ACTIONS) for turn in turns)
    assert turns[0] != turns[1]


@given(st.integers(0, 2**32), st.sampled_from(SPLITS), st.integers(0, 30), st.integers(0, 30))
def test_a_longer_list_begins_with_the_shorter(seed: int, split: str, a: int, b: int) -> None:
    assert generate(seed, a + b, split)[:a] == generate(seed, a, split)


def test_seeds_and_splits_differ_and_do_not_drift() -> None:
    assert generate(0, 20, "train") != generate(1, 20, "train")
    assert generate(0, 20, "train") != generate(0, 20, "valid")
    assert generate(0, 1, "train") == [PINNED]
    with pytest.raises(ValueError, match="not one of train, valid, test"):
        generate(0, 1, "dev")


PINNED = Example(
    "User: Timer: 27 minutes\nCall:",
    ' {"name":"start_timer","arguments":{"minutes":27}}',
)


def test_written_lines_read_back(tmp_path: Path) -> None:
    examples = generate(2, 50, "valid")
    file = write_jsonl(tmp_path / "valid.jsonl", examples)
    read = [Example(**json.loads(line)) for line in file.read_text().splitlines()]
    assert read == examples
    assert [path.name for path in tmp_path.iterdir()] == ["valid.jsonl"]
