"""Where the assistant's messages stand in a rendered conversation, by renderings of its parts.

A template is a program, of which nothing is known but its output. The prompt for an answer is
the conversation before it, and where the answer ends, the conversation up to it does. That holds
for templates that write each message for itself. Others write a message otherwise once more
messages follow: they drop earlier reasoning (Qwen3), or move the system prompt to the last question
(Mistral). There, an answer is found by the text that stays when a word takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

Span = tuple[int, int]
"""A range of characters: the first, and the one after the last."""
Render = Callable[[list[dict[str, Any]], bool], str]
"""Messages as text, and whether it ends with the prompt for an answer. Raises ValueError."""

_TOKEN = re.compile(r"<[^<>\s]{1,40}>")  # as nearly all templates write tokens


def answers(
    render: Render,
    messages: list[dict[str, Any]],
    turns: list[int],
    around: tuple[str, str],
    name: str,
) -> tuple[str, list[Span]]:
    """The text of the conversation, and a span for each of the assistant's messages `turns`.

    `around` is the text of the template `name` before and after a lone answer's text. A span
    ends with the latter, without the white space that follows. Raises ValueError if the template
    refuses the messages, or writes them so that an answer cannot be found.
    """
    whole = render(messages, False)
    spans: list[Span] = []
    for turn in turns:
        span = _by_prefixes(render, messages, turn, whole, around[1].strip())
        span = span or _by_replacement(render, messages, turn, whole, around)
        if span is None:
            raise ValueError(
                f"{name} writes the conversation so that message {turn + 1}, an answer, cannot be "
                "found in it; write the row as "
                '{"prompt": "...", "completion": "..."}, or train with --loss-on all'
            )
        spans.append(_without_space(whole, span, around[1].strip()))
    if any(first[1] > second[0] for first, second in pairwise(spans)):
        raise ValueError(f"{name} does not write the messages in their order")
    return whole, spans


def _by_prefixes(
    render: Render, messages: list[dict[str, Any]], turn: int, whole: str, ending: str
) -> Span | None:
    """From the end of the prompt for the answer to the end of the conversation up to it."""
    try:
        prompt = render(messages[:turn], True)
        begun = render(messages[: turn + 1], False)
    except ValueError:  # a conversation that begins with an answer, say
        return None
    if not (whole.startswith(prompt) and begun.startswith(prompt)):
        return None
    if whole.startswith(begun):
        return len(prompt), len(begun)
    if not ending:
        return None
    # before further messages the template leaves out how the answer begins
    shown, follows = begun[len(prompt) :], whole[len(prompt) :]
    shortest = len(shown) - shown.rindex(ending) if ending in shown else len(shown)
    for size in range(len(shown) - 1, shortest - 1, -1):
        if follows.startswith(shown[-size:]):
            return len(prompt), len(prompt) + size
    return None


def _by_replacement(
    render: Render,
    messages: list[dict[str, Any]],
    turn: int,
    whole: str,
    around: tuple[str, str],
) -> Span | None:
    """The span that changes with the answer, and the template's text around it."""
    probe = next(word for word in map("Probe{}".format, count()) if word not in whole)
    other = {"role": messages[turn]["role"], "content": probe}
    try:
        text = render([*messages[:turn], other, *messages[turn + 1 :]], False)
    except ValueError:
        return None
    before, word, after = text.partition(probe)
    begin, end = around[0], around[1].rstrip()
    if not after.startswith(end):  # after the last answer some write the end of all, too (Phi-3)
        end = end.lstrip().partition("\n")[0]
    if end and not after.startswith(end) and (token := _TOKEN.match(after)):
        end = token[0]  # an answer that others follow has another end than the last (gpt-oss)
    if not word or probe in before + after or not after.startswith(end):
        return None
    if not (whole.startswith(before) and whole.endswith(after)):
        return None
    start, stop = len(before), len(whole) - len(after)
    if stop < start:
        return None
    return start - (len(begin) if before.endswith(begin) else 0), stop + len(end)


def _without_space(text: str, span: Span, ending: str) -> Span:
    """The span without the white space after the ending, which no model has to write."""
    start, stop = span
    stripped = text[start:stop].rstrip()
    return (start, start + len(stripped)) if ending and stripped.endswith(ending) else span
