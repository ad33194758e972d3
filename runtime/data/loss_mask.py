"""From a record of data (an object with fields) to a row: its tokens, and which of them are scored.

Scored are the tokens whose prediction has a loss. Which they are is decided by characters of the
text, before anything is tokenized, and then by the characters that each token stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from runtime.data.answers import Span
from runtime.data.chat import ASSISTANT, ChatTemplate
from runtime.data.conversation import Messages, checked_messages, checked_tools
from runtime.data.fields import (
    MASKED,
    REASONING,
    SCORED,
    Completion,
    Conversation,
    Example,
    PlainText,
)
from runtime.data.text_encoder import TextEncoder
from runtime.data.unread import (
    foreign,
    in_messages,
    inner_begins,
    meeting,
    not_read_in,
    not_written,
    says,
    unknown,
)

LAST_TURN, ALL = "last", "all"


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
    if marked.begins and encoder.bos is not None and not _is_begun(marked.text, encoder):
        tokens, scored = [encoder.bos, *tokens], b"\0" + scored
    if marked.ends and encoder.eos is not None and not _is_ended(marked.text, encoder):
        tokens, scored = [*tokens, encoder.eos], scored + b"\1"
    scored = b"\0" + scored[1:] if scored else b""
    lost = (*marked.lost, *unknown(marked.text, encoder))
    return Row(tokens, scored, 0, marked.warnings, lost, marked.dropped)


def _is_begun(text: str, encoder: TextEncoder) -> bool:
    """Whether a text begins with the BOS, and perhaps white space before it."""
    return encoder.encode(text.lstrip()[:100])[:1] == [encoder.bos]


def _is_ended(text: str, encoder: TextEncoder) -> bool:
    """Whether a text ends with a token that ends an answer, and perhaps white space after it."""
    last = encoder.encode(text.rstrip()[-100:])[-1:]
    return bool(last) and last[0] in encoder.end_tokens


def marked_text(
    example: Example, encoder: TextEncoder, loss_on: str, keep_empty: bool = False
) -> MarkedText:
    """The text of an example, with its scored spans. Raises ValueError where it cannot be used."""
    if isinstance(example, Conversation):
        return _conversation(example, encoder, loss_on, keep_empty)
    if isinstance(example, Completion):
        given, text = len(example.prompt), example.prompt + example.completion
        spans = [(0, given), (given, len(text))]
        spans = spans if loss_on == ALL else spans[1:]
        is_empty = not (keep_empty or says(example.completion, encoder))
        dropped = EMPTY_ANSWER if is_empty else ""
        met = meeting(example.prompt, example.completion)
        lost = (*met, *foreign(text, encoder), *inner_begins(text, encoder))
        return MarkedText(text, spans, begins=True, ends=True, lost=lost, dropped=dropped)
    assert isinstance(example, PlainText)
    text = example.text
    dropped = "" if keep_empty or says(text, encoder) else "it is empty"
    lost = (*foreign(text, encoder), *inner_begins(text, encoder))
    whole = [(0, len(text))]
    return MarkedText(text, whole, begins=True, ends=True, lost=lost, dropped=dropped)


def _conversation(
    example: Conversation, encoder: TextEncoder, loss_on: str, keep_empty: bool
) -> MarkedText:
    chat = encoder.chat()
    read = {name: value for name, value in example.variables.items() if name in chat.words}
    lost = [
        f"{name!r} for the chat template, which does not read it"
        for name in example.variables
        if name not in read
    ]
    chat = chat.having(read)
    messages, tools = checked_messages(example.messages, chat.quoted), checked_tools(example.tools)
    switches = [_is_scored(number, message) for number, message in enumerate(messages, 1)]
    lost += not_read_in(messages, chat)
    messages, ended = _without_ends([_for_template(m, chat) for m in messages], chat, encoder)
    lost += [*ended, *in_messages(example.messages, messages, encoder)]
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
    empty = [
        at
        for at in turns
        if not (keep_empty or at in off or messages[at].get("tool_calls"))
        and not says(messages[at]["content"], encoder)
    ]
    wanted = [at for at in turns if at not in off and at not in empty]
    if empty and wanted:
        lost.append("an answer without text, which is not scored")
    dropped = EMPTY_ANSWER if empty and not wanted else ""
    if loss_on == ALL:
        if not all(on for on, m in zip(switches, messages, strict=True) if m["role"] != ASSISTANT):
            lost.append("a switch in a message that is no answer, which --loss-on all scores")
        text, spans = _answered(chat, messages, tools, sorted({*off, *empty}))
        scored = _between(spans, len(text))
    else:
        messages = messages[: wanted[-1] + 1] if wanted else messages  # the later teach nothing
        text, scored = _answered(chat, messages, tools, wanted)
    warnings, unwritten, more = not_written(chat, messages, tools, text)
    return MarkedText(text, scored, False, False, warnings, (*lost, *more), dropped or unwritten)


def _answered(
    chat: ChatTemplate, messages: Messages, tools: Messages | None, turns: list[int]
) -> tuple[str, list[Span]]:
    return chat.answered(messages, tools, turns) if turns else (chat.text(messages, tools), [])


def _without_ends(
    messages: Messages, chat: ChatTemplate, encoder: TextEncoder
) -> tuple[Messages, list[str]]:
    """Answers without the token that ends them, which the template writes; and what went."""
    ends = {*encoder.end_texts}
    with suppress(ValueError):  # of a template that takes no lone question
        ends.add(chat.ending)
    whole, went = [], []
    for message in messages:
        text = message["content"].rstrip()
        end = next((end for end in ends if end and text.endswith(end)), "")
        if end and message["role"] == ASSISTANT:
            message = {**message, "content": text.removesuffix(end)}
            went.append(f"{end!r} at the end of an answer, where the template writes it")
        whole.append(message)
    return whole, list(dict.fromkeys(went))


def _between(spans: Sequence[Span], length: int) -> list[Span]:
    """What of a text of so many characters lies outside the spans, which are in order."""
    edges = [0, *(edge for span in spans for edge in span), length]
    return [
        (start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop
    ]


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


def _for_template(message: dict[str, Any], chat: ChatTemplate) -> dict[str, Any]:
    """The message without switches, and with its reasoning under the name the template reads."""
    fields = {key: value for key, value in message.items() if key not in (*SCORED, *MASKED)}
    theirs = next((key for key in REASONING if key in chat.words), None)
    ours = next((key for key in REASONING if key in fields), None)
    if theirs is not None and ours is not None and theirs not in fields:
        fields[theirs] = fields.pop(ours)
    return fields


def _tokens(marked: MarkedText, encoder: TextEncoder) -> tuple[list[int], bytes]:
    """The tokens of a text, and which of them reach into a scored span.

    Where a token would lie across the beginning of a span, the text is tokenized in two pieces:
    a model that is given the text before has it in tokens of its own.
    """
    text = marked.text
    tokens, places = encoder.encode_places(text)
    starts = [start for start, _ in marked.spans if 0 < start < len(text)]
    if cuts := crossed(text, starts, tokens, places, encoder):
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


def crossed(
    text: str,
    starts: Sequence[int],
    tokens: Sequence[int],
    places: Sequence[Span],
    encoder: TextEncoder,
) -> list[int]:
    """The starts, which are in order, before which a text alone has other tokens than the whole.

    Only the text from the last border before a start is tokenized again: where a border lies, and
    what tokens there are before it, follows from the text up to its end.
    """
    cuts = []
    begin = first = at = 0  # the last border's character and token, and the token after it
    for start in starts:
        while at < len(tokens) and places[at][1] <= start:
            if tokens[at] in encoder.borders and _is_written(text, places[at], tokens[at], encoder):
                begin, first = places[at][0], at
            at += 1
        alone = encoder.encode(text[begin:start])
        if list(tokens[first : first + len(alone)]) != alone:
            cuts.append(start)
    return cuts


def _is_written(text: str, place: Span, token: int, encoder: TextEncoder) -> bool:
    """Whether a token stands there as it is named; the vocabulary may give its number otherwise."""
    return text[slice(*place)].strip() == encoder.name_of(token)
