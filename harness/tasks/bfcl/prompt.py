"""A question as a plain prompt, and its right answer as the text that completes it.

A base model knows no chat format and no schema of tools, and a phone no long prompts, so functions
are declared in lines of text: a name with its purpose, and a line for each argument with its type.
Everything that the leaderboard's JSON says of a function is in these lines.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from harness.tasks.bfcl.calls import literal, write
from harness.tasks.bfcl.package import Calls, Question

INSTRUCTION = (
    "Answer the request with calls of these functions, as in [name(argument=value), ...]. If none "
    "of them fits, answer []."
)
ENDING = "\n"
"""What ends an answer: it has one line."""

_SPEAKERS = {"system": "Instructions", "user": "Request", "assistant": "Answer"}
_SHOWN = {"type", "description", "properties", "required", "items", "optional", "default", "enum"}
_ABSENT = ""  # among the right values of an argument: it may be left out


def prompt_of(question: Question) -> str:
    """The prompt, which the answer's line follows."""
    functions = "\n\n".join(declaration(function) for function in question.functions)
    said = "\n".join(
        f"{_SPEAKERS[message['role']]}: {message['content'].strip()}"
        for message in question.messages
    )
    return f"{INSTRUCTION}\n\n{functions}\n\n{said}\nCalls:\n"


def declaration(function: dict[str, Any]) -> str:
    """A function in lines of text."""
    parameters = function["parameters"]
    notes = _notes(parameters)
    head = f"{function['name']}{f' ({notes})' if notes else ''}: {function['description'].strip()}"
    return "\n".join([head, *_arguments(parameters, "")])


def _arguments(schema: dict[str, Any], indent: str) -> list[str]:
    """The lines of an object's fields, those of their own fields below them."""
    lines = []
    required = schema.get("required")
    for name, field in schema.get("properties", {}).items():
        optional = field.get("optional") is True or (required is not None and name not in required)
        words = [_type(field), *(["optional"] if optional else [])]
        if notes := _notes({key: value for key, value in field.items() if key != "optional"}):
            words.append(notes)
        says = " ".join(field.get("description", "").split())
        lines.append(f"{indent}- {name} ({', '.join(words)}){f': {says}' if says else ''}")
        lines += _nested(field, indent + "  ")
    return lines


def _nested(schema: dict[str, Any], indent: str) -> list[str]:
    """The lines inside an argument: of its fields, or of its items."""
    lines = _arguments(schema, indent)
    items = schema.get("items")
    if isinstance(items, dict):
        told = {key: value for key, value in items.items() if key not in ("type", "items")}
        notes, says = _notes(told), " ".join(str(told.get("description", "")).split())
        if notes or says:
            of_each = f" ({notes})" if notes else ""
            lines.append(f"{indent}each{of_each}{f': {says}' if says else ''}")
        lines += _nested(items, indent)
    return lines


def _type(schema: dict[str, Any]) -> str:
    inner = schema.get("items")
    of = f" of {_type(inner)}" if isinstance(inner, dict) else ""
    return f"{schema['type']}{of}"


def _notes(schema: dict[str, Any]) -> str:
    """The conditions of a schema on its values, besides their type."""
    words = []
    if "default" in schema:
        words.append(f"default {literal(schema['default'])}")
    if "enum" in schema:
        words.append(f"one of {', '.join(map(literal, schema['enum']))}")
    words += [f"{key} {literal(value)}" for key, value in schema.items() if key not in _SHOWN]
    if "optional" in schema:
        words.append(f"optional {literal(schema['optional'])}")
    return ", ".join(words)


def completion_of(question: Question) -> str:
    """The text of a right answer: the line that is learnt after the prompt."""
    return write(right_calls(question))


def right_calls(question: Question) -> Calls:
    """Right calls: of each argument the first right value, and none where it may be absent.

    No call is right where none is wanted.
    """
    required = {
        function["name"]: function["parameters"]["required"] for function in question.functions
    }
    return [
        {name: _fields(arguments, required.get(name, ()))}
        for answer in question.answers
        for name, arguments in answer.items()
    ]


def _fields(values: dict[str, list[Any]], required: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a call or of an object, from the right values of each."""
    chosen = {}
    for key, right in values.items():
        listed = right if isinstance(right, list) else [right]  # a few objects list no values
        if _ABSENT in listed and key not in required:
            continue
        present = [value for value in listed if value != _ABSENT] or listed
        chosen[key] = _plain(present[0]) if present else []
    return chosen


def _plain(value: Any) -> Any:
    """A right value; the fields of an object have lists of right values of their own."""
    if isinstance(value, dict):
        return _fields(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
