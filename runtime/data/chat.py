"""Conversations as text: renders a bundle's chat template as Hugging Face's transformers does.

A template is a Jinja program written by the model's publisher, so it runs in Jinja's sandbox. The
sandbox provides what transformers documents: blocks that leave no empty lines, `raise_exception`,
`strftime_now`, a `tojson` that keeps characters, and tags for loop control and for `generation`.
Processes that render load Jinja; training never does.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ondevice.errors import DataError
from runtime.data.conversation import Messages, checked_messages, checked_tools

MAX_PRODUCT = 1_000_000  # characters or items that a template may repeat something into
DEFAULT, WITH_TOOLS = "default", "tool_use"  # as checkpoints with several templates name them
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBE = "probe"
_SHOWN = 40  # characters of texts that differ


class ChatTemplate:
    """The chat template of a bundle's tokenizer folder.

    Raises DataError if the folder has none, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        try:
            sources, self._special = _read(folder)
            environment = _environment()
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except DataError:
            raise
        except Exception as error:  # Jinja compiles to Python, whose own errors it lets through
            raise DataError(f"the chat template in {folder} cannot be read: {error}") from error

    def prompt(self, messages: object, tools: object = None) -> str:
        """The conversation up to where the model's answer begins.

        `messages` is a list of objects with a `role` and a `content`; `tools` are declarations
        of functions, for templates that show them. Raises ValueError if it is no such list,
        or where the template refuses it (roles in a wrong order, say).
        """
        return self._render(checked_messages(messages), checked_tools(tools), asks=True)

    def exchange(self, messages: object, tools: object = None) -> tuple[str, str]:
        """The conversation cut in two: `prompt` of all but the last message, and that message.

        Raises ValueError as `prompt` does, and where the last message is not the assistant's
        or is written otherwise than the template's own prompt has begun it.
        """
        checked, declared = checked_messages(messages), checked_tools(tools)
        if checked[-1]["role"] != "assistant":
            raise ValueError(
                "the last of messages must be the assistant's, which is what is learnt; its role "
                f"is {checked[-1]['role']!r}"
            )
        if len(checked) == 1:
            raise ValueError("messages holds an answer and nothing that it answers")
        prompt = self._render(checked[:-1], declared, asks=True)
        whole = self._render(checked, declared, asks=False)
        if not whole.startswith(prompt):
            same = next(at for at in range(len(prompt)) if prompt[at] != whole[at : at + 1])
            raise ValueError(
                "the chat template writes the conversation with its last message otherwise than "
                f"the prompt for it: {whole[same : same + _SHOWN]!r} where the prompt has "
                f'{prompt[same : same + _SHOWN]!r}; write the row as {{"prompt": "...", '
                '"completion": "..."}'
            )
        return prompt, whole.removeprefix(prompt)

    @property
    def ending(self) -> str:
        """What the template writes after an answer, without white space; empty if there is nothing.

        Raises ValueError if the template refuses a question and its answer.
        """
        conversation = [{"role": role, "content": _PROBE} for role in ("user", "assistant")]
        return self._render(conversation, None, asks=False).rpartition(_PROBE)[2].strip()

    def _render(self, messages: Messages, tools: Messages | None, asks: bool) -> str:
        template = self._templates[
            WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        ]
        try:
            text: str = template.render(
                **self._special,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=asks,
            )
            text.encode()  # half a surrogate pair is no text
        except Exception as error:  # a template is a program, and may fail as any does
            raise ValueError(f"the chat template refuses messages: {error}") from error
        return text


def _read(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The sources of templates by name, and the special tokens that they may name."""
    config = _json_object(folder / "tokenizer_config.json")
    own_file, older_file = folder / "chat_template.jinja", folder / "chat_template.json"
    found = config.get("chat_template")
    if own_file.is_file():
        found = own_file.read_text(encoding="utf-8")
    elif found is None and older_file.is_file():
        found = _json_object(older_file).get("chat_template")
    named: dict[str, Any] = {"default": found}
    if isinstance(found, list):
        named = {one["name"]: one["template"] for one in found}
    sources = {name: named[name] for name in (DEFAULT, WITH_TOOLS) if named.get(name) is not None}
    if DEFAULT not in sources:
        raise DataError(
            f"{folder} has no chat template; export from a checkpoint that has one (instruction-"
            'tuned models do), or write rows as {"prompt": "...", "completion": "..."}'
        )
    if not all(isinstance(source, str) for source in sources.values()):
        raise ValueError("it is not text")
    special = {}
    for name in _SPECIAL:
        token = config.get(name, _json_object(folder / "special_tokens_map.json").get(name))
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return sources, special


def _json_object(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return found


class _Generation(Extension):
    """`{% generation %}`, by which templates mark what a model wrote: its body, as it is."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which nothing is repeated or raised into more than memory holds."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not computed in chat templates")
        for one, times in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and len(one) * int(times) > MAX_PRODUCT:
                raise SecurityError(f"more than {MAX_PRODUCT:,} characters or items by repetition")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    now = datetime.now()  # once, so that a conversation across midnight has one date

    def refuse(message: object) -> NoReturn:
        raise TemplateError(str(message))

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = now.strftime
    made.filters["tojson"] = tojson
    return made
