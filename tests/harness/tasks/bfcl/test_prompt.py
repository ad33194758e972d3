"""The plain prompt of a question: its text, and that nothing of a declaration is lost."""

from __future__ import annotations

from typing import Any

from harness.tasks.bfcl.package import Question
from harness.tasks.bfcl.prompt import INSTRUCTION, completion_of, prompt_of, right_calls

BOOK: dict[str, Any] = {
    "name": "hotel.book",
    "description": "Book rooms. ",
    "parameters": {
        "type": "dict",
        "required": ["city", "guests"],
        "properties": {
            "city": {"type": "string", "description": "Where,\nin full."},
            "stars": {"type": "integer", "description": "", "default": 3, "enum": [3, 4]},
            "guests": {
                "type": "array",
                "description": "Who comes.",
                "items": {
                    "type": "dict",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "description": "Full name."},
                        "born": {"type": "string", "format": "date"},
                    },
                },
            },
            "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
            "now": {"type": "boolean", "optional": True},
        },
    },
}
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " A room in Rome for Ann "},
]
ANSWERS = [
    {
        "hotel.book": {
            "city": ["Rome", "Roma"],
            "stars": ["", 3],
            "guests": [[{"name": ["Ann", "Anna"], "born": ["", "2000-01-01"]}]],
            "tags": [["a"]],
            "now": [True],
        }
    }
]
QUESTION = Question("live_simple_0-0-0", "live_simple", ASKED, [BOOK], ANSWERS)


def test_a_question_is_lines_of_text() -> None:
    assert (
        prompt_of(QUESTION)
        == f"""{INSTRUCTION}

hotel.book: Book rooms.
- city (string): Where, in full.
- stars (integer, optional, default 3, one of 3, 4)
- guests (array of dict): Who comes.
  - name (string): Full name.
  - born (string, optional, format "date")
- tags (array of string, optional)
  each (one of "a", "b")
- now (boolean, optional)

Instructions: Be brief.
Request: A room in Rome for Ann
Calls:
"""
    )


def test_its_completion_has_the_first_right_values() -> None:
    assert completion_of(QUESTION) == (
        '[hotel.book(city="Rome", guests=[{"name": "Ann"}], tags=["a"], now=True)]'
    )
    assert right_calls(Question("irrelevance_0", "irrelevance", ASKED, [BOOK], [])) == []


def test_required_arguments_are_given_even_where_they_may_be_absent() -> None:
    answers = [{"hotel.book": {"city": ["", "Rome"], "guests": [""]}}]
    question = Question("simple_python_0", "simple_python", ASKED, [BOOK], answers)
    assert right_calls(question) == [{"hotel.book": {"city": "Rome", "guests": ""}}]
