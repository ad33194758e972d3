"""Checking messages and tools, and bringing them into the form that chat templates expect."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Collection
from typing import Any

from runtime.core.documents import MOST_DEPTH, RepeatedKeyError, from_json_once, is_deeper

Messages = list[dict[str, Any]]
ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
"""The names of speakers in lower case, and the roles that templates know them by."""
_RESULTS = ("tool", "observation", "ipython", "tool_response", "function_response")
"""Names of the role of tools' results; "function" is quoted as a key of declarations, too."""
CALLERS = ("function_call", "tool_call")
"""Speakers whose text is a call, or a list of calls, as JSON (LLaMA-Factory, ms-swift)."""


def cleaned(value: Any, nulls: bool = True) -> Any:
    """A value without the fields that are empty, at every depth.

    Arrow gives each object of a column the keys of all others, with null, and pandas writes an
    empty cell as NaN; both mean that nothing is there. TRL removes nulls alike. Without `nulls`
    they stay, and only NaN goes.
    """
    if isinstance(value, dict):
        return {
            key: cleaned(inner, nulls)
            for key, inner in value.items()
            if not (_is_empty(inner) and (nulls or inner is not None))
        }
    if isinstance(value, list):
        return [None if _is_empty(inner) else cleaned(inner, nulls) for inner in value]
    return value


def as_text(value: object) -> object:
    """A number as its text, as a table's cell would hold it; other values stay as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return json.dumps(value) if abs(value) < math.inf else value  # no cell would hold infinity


def checked_messages(messages: object, quoted: Collection[str] = ()) -> Messages:
    """`messages` with text contents, without empty fields, and with tools' arguments as objects.

    Content may be a list of texts, or of parts that are text. Roles become those of `ROLES`, or
    other names for them that the template has among its `quoted` texts. Raises ValueError, naming
    the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list with messages in it")
    return [_checked(number, message, quoted) for number, message in enumerate(messages, 1)]


def checked_tools(tools: object) -> Messages | None:
    """`tools` as a list of objects, also where they are given as JSON text. Raises ValueError."""
    if isinstance(tools, str):
        tools = _decoded(tools) if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of declarations")
    return [cleaned(tool) for tool in tools]


def _decoded(tools: str) -> object:
    try:
        return from_json_once(tools)
    except RepeatedKeyError as error:
        raise ValueError(f"its tools are JSON text in which {error}") from error
    except ValueError:
        raise ValueError(f"its tools are text that is no JSON: {tools!r:.80}") from None


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)  # NaN


def _checked(number: int, message: object, quoted: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role; write role and content")
    fields = cleaned(message)
    fields["role"] = _role(number, fields["role"], quoted)
    calls = fields.pop("tool_calls", None)
    if not calls and (call := fields.pop("function_call", None)):
        calls = [{"type": "function", "function": call}]
    if calls:
        fields["tool_calls"] = [_call(number, call) for call in _listed(number, calls)]
    content = fields.get("content", "" if calls else None)
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    content = as_text(content)
    if not content and fields.get("refusal"):
        raise ValueError(
            f"message {number} has a refusal in place of its content; write it as content, if it "
            "is to be learnt, or leave the row out"
        )
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no content that is text")
    return {**fields, "content": content}


def _listed(number: int, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise ValueError(f"message {number} has tool_calls that are no list")
    return calls


def _part(number: int, part: object) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        kind = (
            f" (its type is {part['type']!r:.40})"
            if isinstance(part, dict) and "type" in part
            else ""
        )
        raise ValueError(
            f"message {number} has a part that is not text{kind}; models here read text, in parts "
            'as {"type": "text", "text": "..."}'
        )
    return text


def _call(number: int, call: object) -> dict[str, Any]:
    """A call whose arguments are an object: as text, templates would quote them twice."""
    if not isinstance(call, dict):
        raise ValueError(f"message {number} has a tool call that is no object")
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call(number, inner)}
    if "name" not in call:
        raise ValueError(f"message {number} has a tool call without the name of a function")
    return {**call, "arguments": _arguments(number, call["name"], call.get("arguments"))}


def _arguments(number: int, name: object, given: object) -> dict[str, Any]:
    """The arguments of a call: servers write those of none as empty text, or leave them out."""
    value = given
    if isinstance(given, str) and given.strip():
        try:
            value = cleaned(from_json_once(given), nulls=False)
        except RepeatedKeyError as error:
            raise ValueError(f"message {number} calls {name!r} with arguments: {error}") from error
        except ValueError:
            value = _from_python(given)
    elif isinstance(given, str):
        value = {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ValueError(
            f"message {number} calls {name!r} with arguments that are no JSON object: {given!r:.80}"
        )
    return value


def _from_python(text: str) -> object:
    """A value that Python's `str` wrote instead of JSON; the text itself where it is none."""
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return text if is_deeper(value, MOST_DEPTH) else value


def _role(number: int, role: str, quoted: Collection[str]) -> str:
    """The name by which a template of these `quoted` texts knows a role."""
    known = ROLES.get(role.lower())
    if known in ("user", "assistant"):  # whose own words templates write in place of these
        return known
    names = [role]
    if known == "tool":
        names = [role, *_RESULTS] if role in _RESULTS else [*_RESULTS, role]
    if known is None and role not in quoted:
        raise ValueError(
            f"message {number} has the role {role!r}, which the chat template does not name; "
            f"known are {', '.join([*ROLES, *CALLERS])}"
        )
    return next((name for name in names if name in quoted), known or role)
