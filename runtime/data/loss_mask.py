"""From a record of data (an object with fields) to a row: its tokens, and which of them are scored.

Scored are the tokens whose prediction has a loss. Which they are is decided by characters of the
text, before anything is tokenized, and then by the characters that each token stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.data.answers import Span
from runtime.data.chat import ASSISTANT, ChatTemplate
from runtime.data.conversation import Messages, checked_messages, checked_tools
from runtime.data.fields import Completion, Conversation, Example, PlainText
from runtime.data.known_keys import CALL, MASKED, MESSAGE, REASONING, SCORED, not_read
from runtime.data.text_encoder import TextEncoder

ASSISTANT_TURNS, LAST_TURN, ALL = "assistant", "last", "all"


@dataclass(frozen=True)
class Row:
    """Tokens, and for each of them whether it is scored: one byte, 1 or 0.

    `cut` counts the tokens that were left out at the end, and `warnings` say how the
    row may surprise its reader. `lost` names what of the example is not learnt, and `dropped` is
    why none of it is to be.
    """

    tokens: list[int]
    scored: bytes
    cut: int = 0
    warnings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    dropped: str = ""

    @property
    def predicted_tokens(self) -> int:
        """How many tokens are predicted."""
        return max(0, len(self.tokens) - 1)

    def shortened(self, most: int) -> Row:
        """The row with at most `most` tokens to predict."""
        if self.predicted_tokens <= most:
            return self
        stop = most + 1
        return replace(
            self,
            tokens=self.tokens[:stop],
            scored=self.scored[:stop],
            cut=self.predicted_tokens - most,
        )


@dataclass(frozen=True)
class MarkedText:
    """Text with the spans of characters that are scored, in their order.

    `begins` and `ends` say whether the tokenizer's BOS and EOS go around it; `lost` and `dropped`
    are those of the row.
    """

    text: str
    spans: Sequence[Span]
    begins: bool = False
    ends: bool = False
    warnings: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    dropped: str = ""


EMPTY_ANSWER = "its answer is empty"


def row_of(example: Example, encoder: TextEncoder, loss_on: str, keep_empty: bool = False) -> Row:
    """The whole row of an example, however long. Raises ValueError where it cannot be used.

    Answers without text are scored only if `keep_empty`: they teach the model to say nothing.
    """
    marked = marked_text(example, encoder, loss_on, keep_empty)
    marked.text.encode()  # ValueError for half a surrogate pair, which is no text
    tokens, scored = _tokens(marked, encoder)
    # text that went through a template already has them
    if marked.begins and encoder.bos is not None and tokens[:1] != [encoder.bos]:
        tokens, scored = [encoder.bos, *tokens], b"\0" + scored
    if marked.ends and encoder.eos is not None and not _is_ended(marked.text, encoder):
        tokens, scored = [*tokens, encoder.eos], scored + b"\1"
    scored = b"\0" + scored[1:] if scored else b""
    return Row(tokens, scored, 0, marked.warnings, marked.lost, marked.dropped)


def _is_ended(text: str, encoder: TextEncoder) -> bool:
    """Whether a text ends with a token that ends an answer, and perhaps white space after it."""
    last = encoder.encode(text.rstrip()[-100:])[-1:]
    return bool(last) and last[0] in encoder.end_tokens


def marked_text(
    example: Example, encoder: TextEncoder, loss_on: str, keep_empty: bool = False
) -> MarkedText:
    """The text of an example, with its scored spans. Raises ValueError where it cannot be used."""
    if isinstance(example, Conversation):
        return _conversation(example, encoder.chat(), loss_on, keep_empty)
    if isinstance(example, Completion):
        given, text = len(example.prompt), example.prompt + example.completion
        spans = [(0, given), (given, len(text))]
        spans = spans if loss_on == ALL else spans[1:]
        is_empty = not (keep_empty or example.completion.strip())
        dropped = EMPTY_ANSWER if is_empty else ""
        return MarkedText(text, spans, begins=True, ends=True, dropped=dropped)
    assert isinstance(example, PlainText)
    text = example.text
    dropped = "" if keep_empty or text.strip() else "it is empty"
    return MarkedText(text, [(0, len(text))], begins=True, ends=True, dropped=dropped)


def _conversation(
    example: Conversation, chat: ChatTemplate, loss_on: str, keep_empty: bool
) -> MarkedText:
    read = {name: value for name, value in example.variables.items() if name in chat.words}
    lost = [
        f"{name!r} for the chat template, which does not read it"
        for name in example.variables
        if name not in read
    ]
    chat = chat.having(read)
    messages, tools = checked_messages(example.messages, chat.words), checked_tools(example.tools)
    switches = [_is_scored(number, message) for number, message in enumerate(messages, 1)]
    lost += _not_read(messages, chat)
    messages = [_for_template(message, chat) for message in messages]
    turns = [
        at
        for at, message in enumerate(messages)
        if message["role"] == ASSISTANT and at >= example.first
    ]
    if turns == [0] and loss_on != ALL:
        raise ValueError("messages holds an answer and nothing that it answers")
    if loss_on == LAST_TURN:
        turns = turns[-1:]
    off = [at for at in turns if not switches[at]]
    empty = [at for at in turns if not (keep_empty or at in off or _says(messages[at]))]
    wanted = [at for at in turns if at not in off and at not in empty]
    if empty and wanted:
        lost.append("an answer without text, which is not scored")
    dropped = EMPTY_ANSWER if empty and not wanted else ""
    if loss_on == ALL:
        text, spans = (
            chat.answered(messages, tools, sorted({*off, *empty}))
            if off or empty
            else (chat.text(messages, tools), [])
        )
        scored = _between(spans, len(text))
    else:
        messages = messages[: wanted[-1] + 1] if wanted else messages  # the later teach nothing
        text, scored = (
            chat.answered(messages, tools, wanted) if wanted else (chat.text(messages, tools), [])
        )
    warnings, unwritten, more = _lost(chat, messages, tools, text)
    return MarkedText(text, scored, False, False, warnings, (*lost, *more), dropped or unwritten)


def _between(spans: Sequence[Span], length: int) -> list[Span]:
    """What of a text of so many characters lies outside the spans, which are in order."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [
        (start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop
    ]


def _says(message: dict[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls"))


def _is_scored(number: int, message: dict[str, Any]) -> bool:
    """Whether the switches of a message let it be scored. Raises ValueError for other values."""
    scored = True
    for key in (*SCORED, *MASKED):
        value = message.get(key)
        if value is None:
            continue
        value = {"true": 1, "false": 0}.get(value.lower(), value) if type(value) is str else value
        if value not in (0, 1):
            raise ValueError(
                f"message {number} has {key} {message[key]!r}; known are 0 and 1, false and true"
            )
        scored &= bool(value) == (key in SCORED)
    return scored


def _not_read(messages: Messages, chat: ChatTemplate) -> list[str]:
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
    return list(dict.fromkeys(lost))


def _for_template(message: dict[str, Any], chat: ChatTemplate) -> dict[str, Any]:
    """The message without switches, and with its reasoning under the name the template reads."""
    fields = {key: value for key, value in message.items() if key not in (*SCORED, *MASKED)}
    theirs = next((key for key in REASONING if key in chat.words), None)
    ours = next((key for key in REASONING if key in fields), None)
    if theirs is not None and ours is not None and theirs not in fields:
        fields[theirs] = fields.pop(ours)
    return fields


def _lost(
    chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str
) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Warnings, why the row is dropped, and what is lost, where the template does not write all.

    What it does not write is that without which the text is equal.
    """
    warnings = []
    if tools and _same_text(chat, messages, None, text):
        warnings.append(f"{chat.name} does not write the row's tools")
    dropped = ""
    plain = _without(messages, "tool_calls")
    if plain != messages and _same_text(chat, plain, tools, text):
        dropped = f"{chat.name} does not write its tool calls"
    lost = []
    for key in REASONING:
        plain = _without(messages, key)
        if plain != messages and _same_text(chat, plain, tools, text):
            lost.append(f"{key!r} in a message, which {chat.name} does not write")
    return tuple(warnings), dropped, tuple(lost)


def _without(messages: Messages, key: str) -> Messages:
    return [{k: v for k, v in message.items() if k != key} for message in messages]


def _same_text(chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str) -> bool:
    try:
        return chat.text(messages, tools) == text
    except ValueError:  # it does read them
        return False


def _tokens(marked: MarkedText, encoder: TextEncoder) -> tuple[list[int], bytes]:
    """The tokens of a text, and which of them reach into a scored span.

    Where a token would lie across the beginning of a span, the text is tokenized in two pieces:
    a model that is given the text before has it in tokens of its own.
    """
    text = marked.text
    tokens, places = encoder.encode_places(text)
    cuts = [
        start
        for start, _ in marked.spans
        if 0 < start < len(text) and not _begins(tokens, encoder.encode(text[:start]))
    ]
    if cuts:
        tokens, places = [], []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece_tokens, their = encoder.encode_places(text[start:stop])
            tokens += piece_tokens
            places += [(a + start, b + start) for a, b in their]
    scored = bytearray(len(tokens))
    spans = iter(marked.spans)
    span = next(spans, None)
    for at, (start, stop) in enumerate(places):
        while span is not None and span[1] <= start:
            span = next(spans, None)
        if span is None:
            break
        scored[at] = start < span[1] and stop > span[0]
    return tokens, bytes(scored)


def _begins(tokens: list[int], first: list[int]) -> bool:
    return tokens[: len(first)] == first
