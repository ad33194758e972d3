"""A conversation with a model: turns by the bundle's chat template, with one key-value cache."""

from __future__ import annotations

from collections.abc import Generator as Stream
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.bundle.positions import longest_by, longest_sequence
from runtime.config.generate import ChatConfig
from runtime.core.errors import UsageError
from runtime.core.notes import Note, silent, warning
from runtime.machine.footprint import Meter
from runtime.run.budget import check_budget
from runtime.run.generate import Answer, Generator, Prompts, generation_of
from runtime.run.lora import to_apply
from runtime.run.results import Generation
from runtime.run.session import open_checked


class Chat:
    """The messages so far, and the model that answers; use it as a context manager.

    The cache stays between turns: of a new prompt only the tokens beyond the earlier ones are
    read. messages: the conversation, with the system's message first if there is one.
    """

    def __init__(self, config: ChatConfig, note: Note = silent) -> None:
        self.config, self._note = config, note
        self.messages: list[dict[str, str]] = []
        self.reset()
        self.meter = Meter(budget_bytes=config.budget_bytes)
        self._adapter = None if config.adapter is None else Path(config.adapter)
        self._generator: Generator | None = None

    def __enter__(self) -> Chat:
        with ExitStack() as stack:
            stack.enter_context(self.meter)
            bundle = open_checked(self.config.bundle, self.config.device, self._note)
            self._context = _within(bundle.manifest.config, self.config.context, self._note)
            bundle = to_apply(self._adapter, bundle, self._note)
            self._prompts = stack.enter_context(Prompts(bundle, self._note))
            self._prompts.check([*self.messages, {"role": "user", "content": "Hello"}])
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, problem, traceback)

    def reset(self) -> None:
        """Forget the conversation, but for the system's message."""
        system = self.config.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str) -> Turn:
        """The model's answer to a user's message.

        Raises:
            UsageError: the template refuses the message, or the conversation has become longer
                than its context; it is then as it was before.
        """
        prompt = self._prompts.write([*self.messages, {"role": "user", "content": text}])
        if self._generator is None:
            self._open()
        assert self._generator is not None
        if len(prompt.tokens) >= (most := self._generator.context):
            limit = longest_sequence(self._prompts.bundle.manifest.config)
            more = "" if most == limit else ", or give a larger --context"
            whose = "the model was made for" if most == limit else "its context holds"
            raise UsageError(
                f"the conversation would have {len(prompt.tokens)} tokens, and {whose} {most}: "
                f"begin again (/reset){more}"
            )
        answer = Answer(len(prompt.tokens))
        pieces = self._generator.pieces(prompt, answer)
        self.messages.append({"role": "user", "content": text})
        return Turn(self, text, pieces, answer)

    def _open(self) -> None:
        """Open the model, once there has been a prompt: before that, the tokenizer took memory."""
        self._generator = Generator(
            *(self.config, self._prompts.bundle, self._adapter, self._prompts.encoder),
            *(self._context, self._note),
        )
        self.plan = self._generator.plan


def _within(settings: Mapping[str, Any], context: int, note: Note) -> int:
    """The tokens that a conversation may have: no more than the model was made for."""
    limit = longest_sequence(settings)
    if limit is None or context <= limit:
        return context
    note(
        warning(
            f"the conversation may have {limit} tokens, not {context} (--context): the model was "
            f"made for sequences of at most {limit} ({longest_by(settings)})"
        )
    )
    return limit


class Turn:
    """The model's answer to a message: an iterator over its text.

    The answer joins the conversation as far as it was read when the iteration ends, even early.
    """

    def __init__(self, chat: Chat, text: str, pieces: Iterator[str], answer: Answer) -> None:
        self.answer = answer
        self._chat, self._text, self._pieces = chat, text, pieces
        self._said: list[str] = []

    def __iter__(self) -> Stream[str, None, None]:
        try:
            for piece in self._pieces:
                self._said.append(piece)
                yield piece
                check_budget(self._chat.meter, self._chat.plan, "the conversation ended")
        finally:
            text = "".join(self._said)
            self._chat.messages.append({"role": "assistant", "content": text})

    @property
    def result(self) -> Generation:
        """The message with its answer, as far as it was read."""
        chat = self._chat
        return generation_of(self._text, self._said, self.answer, chat.plan, chat.meter)
