"""Parts of a row that are not learnt as they stand: fields not read, text not written.

Each is counted in the report of the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.data.chat import ASSISTANT, ChatTemplate
from runtime.data.conversation import Messages
from runtime.data.fields import (
    CALL,
    MASKED,
    MESSAGE,
    NOTHING,
    PART,
    REASONING,
    SCORED,
    not_read,
)
from runtime.data.text_encoder import TextEncoder

# tokens of some model's template, as nearly all write them
_TOKENS = re.compile(r"<\|\w{1,40}\|>|<(?:start|end)_of_turn>|^\s*<s>|</s>\s*$")
_ENDS = (".", "?", "!", ":")
_NOTHING = re.compile("<think>\\s*</think>|[\\s\u200b-\u200d\u2060\ufeff]+")


def says(text: str, encoder: TextEncoder) -> bool:
    """Whether a text has more than space, BOS, tokens that end it, and a thought of nothing."""
    begin = [] if encoder.bos is None else [encoder.name_of(encoder.bos)]
    for token in (*begin, *encoder.end_texts):
        text = text.replace(token, "")
    return bool(_NOTHING.sub("", text))


def foreign(text: str, encoder: TextEncoder) -> list[str]:
    """The tokens of another model's template that stand in a text."""
    there = dict.fromkeys(token.strip() for token in _TOKENS.findall(text))
    return [
        f"{token!r}, which is no token of this model" for token in there if _is_text(token, encoder)
    ]


def meeting(prompt: str, completion: str) -> list[str]:
    """A sentence and an answer between which there is no space, as two cells of a table are."""
    if prompt[-1:] in _ENDS and completion[:1].isascii() and completion[:1].isalnum():
        return ["a prompt that its completion follows without a space, and is learnt so"]
    return []


def inner_begins(text: str, encoder: TextEncoder) -> list[str]:
    """The BOS where a text does not begin."""
    begin = "" if encoder.bos is None else encoder.name_of(encoder.bos)
    return [f"{begin!r} inside its text"] if begin and begin in text.lstrip()[1:] else []


def unknown(text: str, encoder: TextEncoder) -> list[str]:
    """The characters, or words, for which the tokenizer has no token: the model never sees them."""
    return [
        f"the {'word' if len(part) > 1 else 'character'} {part!r:.40}, for which the tokenizer has "
        "no token"
        for part in encoder.unknown_in(text)
    ]


def _is_text(token: str, encoder: TextEncoder) -> bool:
    return len(encoder.encode(token)) > 1


def in_messages(given: object, messages: Messages, encoder: TextEncoder) -> list[str]:
    """Oddities of messages, whatever the template: `given` as they stand in the row."""
    lost = [
        f"the field {key!r} in a part of a message, which is not read"
        for message in (given if isinstance(given, list) else [])
        for part in (message.get("content") if isinstance(message.get("content"), list) else [])
        if isinstance(part, dict)
        for key in not_read(part, PART)
    ]
    for message in messages:
        text = message["content"]
        if text.strip() in NOTHING:
            lost.append(
                f"nothing but the word {text.strip()!r} in a message, as some programs write an "
                "empty cell"
            )
        lost += [f"{part}, in a message" for part in foreign(text, encoder)]
        lost += [
            f"the special token {token!r} in a message, as if the template had written it"
            for token in encoder.special_text.findall(text)
        ]
    return _once(lost)


def not_read_in(messages: Messages, chat: ChatTemplate) -> list[str]:
    """Keys of messages and calls that neither this program nor the template reads."""
    read = {*MESSAGE, *SCORED, *MASKED, *REASONING, *chat.words}
    lost = [
        f"the field {key!r} in a message, which is not read"
        for message in messages
        for key in not_read(message, read)
    ]
    lost += [
        f"the field {key!r} in a tool call, which is not read"
        for message in messages
        for call in message.get("tool_calls") or []
        for key in not_read(_joined(call), {*CALL, *chat.words})
    ]
    lost += [
        f"a switch {key!r} in a message that is no answer, which is not scored for that"
        for message in messages
        for key in SCORED[1:]
        if message["role"] != ASSISTANT and message.get(key) in (True, "true")
    ]
    return _once(lost)


def not_written(
    chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Warnings, why the row is dropped, and what is lost, where the template does not write all.

    What it does not write is that without which the text is equal.
    """
    warnings = []
    if tools and _same_text(chat, messages, None, text):
        warnings.append(f"{chat.name} does not write the row's tools")
    dropped = ""
    plain = [_without(message, "tool_calls") for message in messages]
    if plain != messages and _same_text(chat, plain, tools, text):
        dropped = f"{chat.name} does not write its tool calls"
    places = [*_results(messages), *_extras(messages, chat)]
    lost = [
        f"{place.named(messages)}, which {chat.name} does not write"
        for place in _unwritten(places, chat, messages, tools, text)
    ]
    written = _squeezed(text)
    if any(_squeezed(m["content"]) not in written for m in messages if m["role"] in _WHOLE):
        lost.append(f"a message of which {chat.name} does not write all")
    return tuple(warnings), dropped, tuple(_once(lost))


_WHOLE = ("system", "user", ASSISTANT)  # whose texts are written as they stand


@dataclass(frozen=True)
class _Place:
    """A field of a message, or of all its calls, that the template may write or leave out."""

    at: int  # the message
    key: str
    is_in_calls: bool = False

    @property
    def mark(self) -> str:
        """A text that no other place has."""
        return f"mark{self.at}{'call' * self.is_in_calls}-{self.key}."

    def named(self, messages: Messages) -> str:
        """The words for it in the report."""
        if self.is_in_calls:
            return f"{self.key!r} in a tool call"
        if self.key == "content":
            return f"a message of {messages[self.at]['role']!r}"
        return f"{self.key!r} in a message"

    def changed(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with another value there: a text is marked, any other value goes."""
        if not self.is_in_calls:
            return self._changed(message)
        calls = [
            {**self._changed(call), "function": self._changed(call["function"])}
            if isinstance(call.get("function"), dict)
            else self._changed(call)
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    def _changed(self, fields: dict[str, Any]) -> dict[str, Any]:
        if isinstance(value := fields.get(self.key), str):
            return {**fields, self.key: f"{value}{self.mark}"}
        return _without(fields, self.key)


def _results(messages: Messages) -> list[_Place]:
    """The results of tools, which a template may write as JSON."""
    return [
        _Place(at, "content")
        for at, message in enumerate(messages)
        if message["role"] not in _WHOLE
    ]


def _extras(messages: Messages, chat: ChatTemplate) -> list[_Place]:
    """The fields beyond the usual ones, of which the template knows the names; others are lost."""
    places = []
    for at, message in enumerate(messages):
        keys = not_read(message, MESSAGE)
        places += [_Place(at, key) for key in keys if key in chat.words or key in REASONING]
        calls = message.get("tool_calls") or []
        inner = {key for call in calls for key in not_read(_joined(call), CALL)}
        places += [_Place(at, key, is_in_calls=True) for key in sorted(inner & chat.words)]
    return places


def _unwritten(
    places: Sequence[_Place],
    chat: ChatTemplate,
    messages: Messages,
    tools: Messages | None,
    text: str,
) -> list[_Place]:
    """The places whose change leaves the text equal.

    All are changed at once first: mostly all are written, or none is, and one text shows it.
    """
    shown: set[_Place] = set()

    def is_equal(asked: Sequence[_Place]) -> bool:
        changed = list(messages)
        for place in asked:
            changed[place.at] = place.changed(changed[place.at])
        try:
            now = chat.text(changed, tools)
        except ValueError:  # it reads one of them
            return False
        shown.update(place for place in asked if place.mark in now and place.mark not in text)
        return now == text

    def equal_among(asked: Sequence[_Place]) -> list[_Place]:
        if not asked or is_equal(asked):
            return list(asked)
        left = [place for place in asked if place not in shown]
        if len(left) < len(asked):
            return equal_among(left)
        half = len(left) // 2
        return [*equal_among(left[:half]), *equal_among(left[half:])] if half else []

    return equal_among(places)


def _joined(call: dict[str, Any]) -> dict[str, Any]:
    """The fields of a call, and of the function in it."""
    inner = call.get("function")
    return {**call, **(inner if isinstance(inner, dict) else {})}


def _without(fields: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name != key}


def _same_text(chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str) -> bool:
    try:
        return chat.text(messages, tools) == text
    except ValueError:  # it does read them
        return False


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
