"""Conversations as text: renders a bundle's chat template by Hugging Face's transformers.

Only processes that render load transformers, and they are limited (`runtime.data.limits`). A
template is a Jinja program written by the model's publisher. transformers runs it in Jinja's
sandbox, to which this adds limits for each conversation: no powers, bounds on the time of the CPU
and on the length of the text, and on Linux one on memory. To pass a limit is the fault of the
template, and not of a row, which could be left out.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer, models

from runtime.core.errors import DataError
from runtime.data.answers import Span, answers
from runtime.data.conversation import Messages, checked_messages, checked_tools
from runtime.data.limits import TooSlowError, bounded_memory, bounded_seconds
from runtime.data.tokenizer_files import (
    DEFAULT,
    STANDARD,
    WITH_TOOLS,
    special_of,
    templates_of,
    tokenizer_files,
)

MOST_BYTES = 1 << 30  # memory that rendering one conversation may take
MOST_SECONDS = 5  # of the CPU that it may take
MOST_CHARS, MOST_GROWTH = 1 << 20, 10  # of its text: so long, or so much longer than its messages
ASSISTANT = "assistant"
RESERVED = frozenset(
    {
        *STANDARD,
        *("messages", "conversation", "conversations", "tools", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "self"),
        "tokenizer_kwargs",
    }
)
"""Names that rendering gives a meaning of its own, which a row may not change."""
_PROBE = "probe"
_QUESTION = {"role": "user", "content": _PROBE}
_UNREADABLE = (jinja2.TemplateSyntaxError, SyntaxError, RecursionError)


class ChatTemplate:
    """The chat template of a bundle's tokenizer folder.

    Raises DataError if the folder has none, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.name = f"the chat template of {folder.parent.name}"
        self._folder = folder
        self._variables: dict[str, Any] = {}
        try:
            self._templates, special = _read(folder)
            for template in self._templates.values():
                _check(template)
        except DataError:
            raise
        except Exception as error:
            raise self._unreadable(error) from error
        self._tokenizer = _renderer(self._templates, special)
        with suppress(ValueError):  # of a template that can be read, but takes no lone question
            self._render([_QUESTION], None, asks=True)

    def prompt(self, messages: object, tools: object = None) -> str:
        """The conversation up to where the model's answer begins.

        `messages` is a list of objects with a `role` and a `content`; `tools` are declarations
        of functions, for templates that show them. Raises ValueError if it is no such list,
        or where the template refuses it (roles in a wrong order, say).
        """
        return self._render(
            checked_messages(messages, self.quoted), checked_tools(tools), asks=True
        )

    def text(self, messages: Messages, tools: Messages | None = None) -> str:
        """The whole conversation, of checked messages. Raises ValueError as `prompt` does."""
        return self._render(messages, tools, asks=False)

    def answered(
        self, messages: Messages, tools: Messages | None, turns: list[int]
    ) -> tuple[str, list[Span]]:
        """The conversation, and where in it the assistant's messages `turns` stand.

        A span holds an answer and the token that ends it. The template itself marks it by
        `{% generation %}`, or `runtime.data.answers` looks for it. Raises ValueError as `prompt`
        does, and where an answer cannot be found.
        """
        marked = self._marked(messages, tools)
        every = [at for at, message in enumerate(messages) if message["role"] == ASSISTANT]
        if marked is not None and turns == every:
            return marked

        def render(part: Messages, asks: bool) -> str:
            return self._render(part, tools, asks)

        text, spans = answers(render, messages, turns, self._around, self.name)
        if marked is not None:
            return text, [span for span in marked[1] if any(a <= span[0] < b for a, b in spans)]
        return text, spans

    @cached_property
    def words(self) -> frozenset[str]:
        """The names, and the texts in quotes, of which the template's program is made."""
        return self.quoted | self._of_kind("name")

    @cached_property
    def quoted(self) -> frozenset[str]:
        """The texts in quotes, such as the roles that the template tells apart."""
        return self._of_kind("string")

    def _of_kind(self, kind: str) -> frozenset[str]:
        templates = self._templates.values()
        lexed = (word for template in templates for word in _words(template))
        return frozenset(word.strip("'\"") for _, its, word in lexed if its == kind)

    def having(self, variables: dict[str, Any]) -> ChatTemplate:
        """The template that is given further values by name, such as `enable_thinking`.

        Raises ValueError for a name that has a meaning of its own.
        """
        if not variables:
            return self
        if taken := (RESERVED | self._tokenizer.special_tokens_map.keys()).intersection(variables):
            raise ValueError(f"chat_template_kwargs may not hold {min(taken)!r}")
        other = copy.copy(self)
        other.__dict__.pop("_around", None)
        other._variables = variables
        return other

    @property
    def ending(self) -> str:
        """The text that the template writes after an answer, without white space; may be empty.

        Raises ValueError if the template refuses a question and its answer.
        """
        return self._around[1].strip()

    @cached_property
    def _around(self) -> tuple[str, str]:
        """The template's text between a prompt and its answer's text, and after that."""
        answer = {"role": ASSISTANT, "content": _PROBE}
        prompt = self._render([_QUESTION], None, asks=True)
        whole = self._render([_QUESTION, answer], None, asks=False)
        before, _, after = whole.rpartition(_PROBE)
        return before.removeprefix(prompt) if before.startswith(prompt) else "", after

    def _marked(self, messages: Messages, tools: Messages | None) -> tuple[str, list[Span]] | None:
        """The text and the spans that the template marks; None if it marks nothing."""
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._templates[_name_of(self._templates, tools)]
        if not any(kind == "name" and word == "generation" for _, kind, word in _words(template)):
            return None
        with self._rendering():
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._variables,
                **self._tokenizer.special_tokens_map,
            )
            self._check_length(texts[0], messages, tools)
        if not any(start < stop for start, stop in spans[0]):
            raise ValueError(f"{self.name} marks no answer by {{% generation %}}")
        return texts[0], [(start, stop) for start, stop in spans[0]]

    def _render(self, messages: Messages, tools: Messages | None, asks: bool) -> str:
        with self._rendering():
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=asks,
                tokenize=False,
                **self._variables,
            )
            self._check_length(text, messages, tools)
            text.encode()  # half a surrogate pair is no text
        return text

    def _check_length(self, text: str, messages: Messages, tools: Messages | None) -> None:
        if len(text) <= MOST_CHARS:
            return
        given = len(json.dumps([messages, tools]))
        if len(text) > MOST_GROWTH * given:
            raise DataError(
                f"{self.name} writes {len(text):,} characters for a conversation of {given:,}"
            )

    @contextmanager
    def _rendering(self) -> Iterator[None]:
        try:
            with bounded_memory(MOST_BYTES), bounded_seconds(MOST_SECONDS):
                yield
        except DataError:
            raise
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        except MemoryError:
            raise DataError(
                f"{self.name} takes more than {MOST_BYTES:,} bytes (RLIMIT_AS) for one conversation"
            ) from None
        except TooSlowError:
            raise DataError(
                f"{self.name} takes more than {MOST_SECONDS} s of the CPU for one conversation"
            ) from None
        except Exception as error:  # a template is a program, and may fail as any does
            raise ValueError(f"the chat template refuses messages: {error}") from error

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(
            f"the chat template in {self._folder} cannot be read: {error}; correct it in the "
            "checkpoint and export again, or write rows and prompts of plain text"
        )


def has_template(folder: Path) -> bool:
    """Whether a tokenizer folder has a chat template, one that can be read or not."""
    try:
        return bool(_read(folder)[0])
    except DataError:
        return False
    except Exception:  # whoever needs the template is told
        return True


def _renderer(templates: dict[str, str], special: dict[str, str]) -> Any:
    """transformers' tokenizer with these templates and no vocabulary: rendering needs none."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is not there
    from transformers import PreTrainedTokenizerFast

    standard = {name: text for name, text in special.items() if name in STANDARD}
    others = {name: text for name, text in special.items() if name not in STANDARD}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()),
        chat_template=templates,
        model_specific_special_tokens=others,
        **standard,
    )


def _name_of(templates: dict[str, str], tools: Messages | None) -> str:
    return WITH_TOOLS if tools is not None and WITH_TOOLS in templates else DEFAULT


def _words(template: str) -> list[tuple[int, str, str]]:
    """The words of a template, as (line, type, text)."""
    return list(jinja2.Environment().lex(template))


def _check(template: object) -> None:
    """Refuse powers, which the sandbox allows: they may take longer than anybody waits."""
    if not isinstance(template, str):
        raise ValueError("it is not text")
    if any(kind == "operator" and word == "**" for _, kind, word in _words(template)):
        raise ValueError("it computes a power, which may take forever")


def _read(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The templates by name, and the special tokens that they may name."""
    files = tokenizer_files(folder, vocabulary=False)
    templates = templates_of(files)
    if DEFAULT not in templates:
        others = f"; it has only {', '.join(sorted(templates))}, and none named {DEFAULT}"
        raise DataError(
            f"{folder} has no chat template; export from a checkpoint that has one (instruction-"
            'tuned models do), or write rows as {"prompt": "...", "completion": "..."}'
            f"{others if templates else ''}"
        )
    used = {name: templates[name] for name in (DEFAULT, WITH_TOOLS) if name in templates}
    return used, special_of(files).named
