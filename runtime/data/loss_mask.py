"""From a record of data (an object with fields) to a row: its tokens, and which of them are scored.

Scored are the tokens whose prediction has a loss. Which they are is decided by characters of the
text, before anything is tokenized, and then by the characters that each token stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.data.answers import Span
from runtime.data.chat import ASSISTANT, ChatTemplate
from runtime.data.conversation import Messages, checked_messages, checked_tools
from runtime.data.fields import Completion, Conversation, Example, PlainText
from runtime.data.text_encoder import TextEncoder

ASSISTANT_TURNS, LAST_TURN, ALL = "assistant", "last", "all"


@dataclass(frozen=True)
class Row:
    """Tokens, and for each of them whether it is scored: one byte, 1 or 0.

    `cut` counts the tokens that were left out at the end, and `warnings` say how the
    row may surprise its reader.
    """

    tokens: list[int]
    scored: bytes
    cut: int = 0
    warnings: tuple[str, ...] = ()

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

    `begins` and `ends` say whether the tokenizer's BOS and EOS go around it.
    """

    text: str
    spans: Sequence[Span]
    begins: bool = False
    ends: bool = False
    warnings: tuple[str, ...] = ()


def row_of(example: Example, encoder: TextEncoder, loss_on: str) -> Row:
    """The whole row of an example, however long. Raises ValueError where it cannot be used."""
    marked = marked_text(example, encoder, loss_on)
    marked.text.encode()  # ValueError for half a surrogate pair, which is no text
    tokens, scored = _tokens(marked, encoder)
    if marked.begins and encoder.bos is not None:
        tokens, scored = [encoder.bos, *tokens], b"\0" + scored
    if marked.ends and encoder.eos is not None:
        tokens, scored = [*tokens, encoder.eos], scored + b"\1"
    return Row(tokens, b"\0" + scored[1:] if scored else b"", 0, marked.warnings)


def marked_text(example: Example, encoder: TextEncoder, loss_on: str) -> MarkedText:
    """The text of an example, with its scored spans. Raises ValueError where it cannot be used."""
    if isinstance(example, Conversation):
        return _conversation(example, encoder.chat(), loss_on)
    if isinstance(example, Completion):
        given, text = len(example.prompt), example.prompt + example.completion
        spans = [(0, given), (given, len(text))]
        return MarkedText(text, spans if loss_on == ALL else spans[1:], begins=True, ends=True)
    assert isinstance(example, PlainText)
    return MarkedText(example.text, [(0, len(example.text))], begins=True, ends=True)


def _conversation(example: Conversation, chat: ChatTemplate, loss_on: str) -> MarkedText:
    messages, tools = checked_messages(example.messages), checked_tools(example.tools)
    if loss_on == ALL:
        text = chat.text(messages, tools)
        return MarkedText(text, [(0, len(text))], warnings=_lost(chat, messages, tools, text))
    turns = [
        at
        for at, message in enumerate(messages)
        if message["role"] == ASSISTANT and at >= example.first
    ]
    if turns == [0]:
        raise ValueError("messages holds an answer and nothing that it answers")
    messages = messages[: turns[-1] + 1] if turns else messages  # later messages teach nothing
    if not turns:
        return MarkedText(chat.text(messages, tools), [])
    text, spans = chat.answered(messages, tools, turns[-1:] if loss_on == LAST_TURN else turns)
    return MarkedText(text, spans, warnings=_lost(chat, messages, tools, text))


def _lost(
    chat: ChatTemplate, messages: Messages, tools: Messages | None, text: str
) -> tuple[str, ...]:
    """Warnings where the template does not write tools or calls: without them the text is equal."""
    warnings = []
    if tools and _same_text(chat, messages, None, text):
        warnings.append(f"{chat.name} does not write the row's tools")
    plain: Messages = [
        {k: v for k, v in message.items() if k != "tool_calls"} for message in messages
    ]
    if plain != messages and _same_text(chat, plain, tools, text):
        warnings.append(f"{chat.name} does not write the row's tool calls")
    return tuple(warnings)


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
