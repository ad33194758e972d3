"""Checking messages and tools, and bringing them into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from runtime.core.documents import from_json

Messages = list[dict[str, Any]]


def checked_messages(messages: object) -> Messages:
    """`messages` with text contents, without empty fields, and with tools' arguments as objects.

    Content may be a list of text parts. Raises ValueError, naming the message.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list with messages in it")
    return [_checked(number, message) for number, message in enumerate(messages, 1)]


def checked_tools(tools: object) -> Messages | None:
    """`tools` as a list of objects, also where they are given as JSON text. Raises ValueError."""
    if isinstance(tools, str):
        tools = from_json(tools)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools is not a list of declarations")
    return tools


def _checked(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} has no role; write role and content")
    fields = {key: value for key, value in message.items() if value is not None}
    calls = fields.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_call(number, call) for call in _listed(number, calls)]
    content = fields.get("content", "" if calls else None)
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message {number} has no content that is text")
    return {**fields, "content": content}


def _listed(number: int, calls: object) -> list[Any]:
    if not isinstance(calls, list):
        raise ValueError(f"message {number} has tool_calls that are no list")
    return calls


def _part(number: int, part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"message {number} has a part that is not text; models here read text")
    return text


def _call(number: int, call: object) -> dict[str, Any]:
    """A call whose arguments are an object: as text, templates would quote them twice."""
    if not isinstance(call, dict):
        raise ValueError(f"message {number} has a tool call that is no object")
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _call(number, inner)}
    given = call.get("arguments")
    return {**call, "arguments": from_json(given)} if isinstance(given, str) else call
