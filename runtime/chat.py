"""Conversations as text: a bundle's chat template, as the tools of Hugging Face render it.

A template is a Jinja program of whoever published the model, so it runs in Jinja's sandbox. It
expects of its surroundings what transformers documents: blocks that leave no line of their own,
`raise_exception`, `strftime_now`, a `tojson` that keeps characters, and tags for loop control and
for `generation`. Jinja is loaded by processes that render, never by training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ondevice.errors import DataError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBE = "probe"


class _Generation(Extension):
    """`{% generation %}`, by which templates mark what a model wrote: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The chat template of a bundle's tokenizer folder.

    Raises DataError where the folder has none, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        try:
            source, self._special = _read(folder)
            self._template = _environment().from_string(source)
        except (OSError, ValueError, TemplateError) as error:
            raise DataError(f"the chat template in {folder} cannot be read: {error}") from error

    def prompt(self, messages: object, tools: object = None) -> str:
        """The conversation up to where the model's answer begins.

        `messages` is a list of objects with a `role` and a `content`; `tools` are declarations
        of functions, for templates that show them. Raises ValueError where it is no such list,
        or where the template refuses it (roles in a wrong order, say).
        """
        return self._render(_checked(messages), tools, add_generation_prompt=True)

    def exchange(self, messages: object, tools: object = None) -> tuple[str, str]:
        """The conversation cut in two: `prompt` of all but the last message, and that message.

        Raises ValueError as `prompt` does, and where the last message is not the assistant's
        or is written otherwise than the template's own prompt has begun it.
        """
        checked = _checked(messages)
        if checked[-1].get("role") not in ("assistant", "model"):
            raise ValueError(
                "the last of messages must be the assistant's, which is what is learnt; its role "
                f"is {checked[-1].get('role')!r}"
            )
        if len(checked) == 1:
            raise ValueError("messages holds an answer and nothing that it answers")
        prompt = self.prompt(checked[:-1], tools)
        whole = self._render(checked, tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(
                "the chat template begins the last message otherwise than its own prompt; write "
                'the row as {"prompt": "...", "completion": "..."}'
            )
        return prompt, whole.removeprefix(prompt)

    @property
    def ending(self) -> str:
        """What the template writes after an answer, without white space; empty where nothing.

        Raises ValueError where the template refuses a question and its answer.
        """
        conversation = [{"role": role, "content": _PROBE} for role in ("user", "assistant")]
        whole = self._render(conversation, None, add_generation_prompt=False)
        return whole.rpartition(_PROBE)[2].strip()

    def _render(self, messages: Sequence[dict[str, Any]], tools: object, **options: bool) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, **self._special, **options)
        except Exception as error:  # a template is a program, and may fail as any does
            raise ValueError(f"the chat template refuses messages: {error}") from error


def _read(folder: Path) -> tuple[str, dict[str, str]]:
    """The template's source and the special tokens that it may name."""
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json is not a JSON object")
    own_file, older_file = folder / "chat_template.jinja", folder / "chat_template.json"
    source = config.get("chat_template")
    if own_file.is_file():
        source = own_file.read_text(encoding="utf-8")
    elif source is None and older_file.is_file():
        source = json.loads(older_file.read_bytes()).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        raise DataError(
            f"{folder} has no chat template; export from a checkpoint that has one (instruction-"
            'tuned models do), or write rows as {"prompt": "...", "completion": "..."}'
        )
    if not isinstance(source, str):
        raise ValueError(f"it is {type(source).__name__}, not text")
    special = {}
    for name in _SPECIAL:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return source, special


def _environment() -> ImmutableSandboxedEnvironment:
    def refuse(message: object) -> NoReturn:
        raise TemplateError(str(message))

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.filters["tojson"] = tojson
    return made


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list with messages in it")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role; write role and content")
        if not ("content" in message or "tool_calls" in message):
            raise ValueError(f"message {number} has no content")
    return messages
