"""Parts of a row that are not learnt as they stand: fields not read, text not written.

Each is counted in the report of the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

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
        for key in not_read({**call, **(call.get("function") or {})}, {*CALL, *chat.words})
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
    lost = [
        f"a message of {messages[at]['role']!r}, which {chat.name} does not write"
        for at in _unwritten(chat, messages, tools, text)
    ]
    for at, message in enumerate(messages):
        for key in not_read(message, MESSAGE):
            if key not in chat.words and key not in REASONING:
                continue  # which is named already
            plain = [*messages[:at], _without(message, key), *messages[at + 1 :]]
            if _same_text(chat, plain, tools, text):
                lost.append(f"{key!r} in a message, which {chat.name} does not write")
        calls = message.get("tool_calls") or []
        for key in sorted({key for call in calls for key in _keys(call)} & chat.words):
            fewer = [_without_in_call(call, key) for call in calls]
            plain = [*messages[:at], {**message, "tool_calls": fewer}, *messages[at + 1 :]]
            if _same_text(chat, plain, tools, text):
                lost.append(f"{key!r} in a tool call, which {chat.name} does not write")
    written = _squeezed(text)
    if any(_squeezed(m["content"]) not in written for m in messages if m["role"] in _WHOLE):
        lost.append(f"a message of which {chat.name} does not write all")
    return tuple(warnings), dropped, tuple(_once(lost))


_WHOLE = ("system", "user", ASSISTANT)  # whose texts are written as they stand


def _unwritten(
    chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str
) -> list[int]:
    """Which results of tools a template does not write; it may write them as JSON.

    All are changed at once first: mostly all are written, and one text shows it.
    """
    marks = {at: f"mark{at}." for at, each in enumerate(messages) if each["role"] not in _WHOLE}
    changed = [
        {**message, "content": f"{message['content']}{marks[at]}"} if at in marks else message
        for at, message in enumerate(messages)
    ]
    with suppress(ValueError):  # it reads them
        marked = chat.text(changed, tools) if marks else text
        if all(mark in marked and mark not in text for mark in marks.values()):
            return []
    return [
        at
        for at in marks
        if _same_text(chat, [*messages[:at], changed[at], *messages[at + 1 :]], tools, text)
    ]


def _keys(call: dict[str, object]) -> list[str]:
    inner = call.get("function")
    return not_read([*call, *(inner if isinstance(inner, dict) else ())], CALL)


def _without(fields: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name != key}


def _without_in_call(call: dict[str, object], key: str) -> dict[str, object]:
    inner = call.get("function")
    fewer = _without(call, key)
    return {**fewer, "function": _without(inner, key)} if isinstance(inner, dict) else fewer


def _same_text(chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str) -> bool:
    try:
        return chat.text(messages, tools) == text
    except ValueError:  # it does read them
        return False


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
