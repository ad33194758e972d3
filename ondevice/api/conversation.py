"""Conversations with a model from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ondevice.api.process import hearing, prepare, refuse_others, refuse_threads_and_forks
from runtime.config.generate import ChatConfig
from runtime.core.errors import UsageError
from runtime.core.notes import Note

if TYPE_CHECKING:
    from runtime.run.chat import Chat
    from runtime.run.results import Generation


def chat(config: ChatConfig, *, on_note: Note | None = None) -> Conversation:
    """A conversation with a model, with or without an adapter, as `ondevice chat` holds it.

    It is a context manager: the model is in memory inside the `with` statement.
    on_note(text) receives lines for people.
    """
    refuse_others(config, ChatConfig)
    prepare()
    return Conversation(config, on_note)


class Conversation:
    """The messages so far, and the model that answers, inside a `with` statement.

    Entering it raises BundleError or DataError if the bundle or the adapter cannot be used.
    """

    def __init__(self, config: ChatConfig, on_note: Note | None) -> None:
        adapter = None if config.adapter is None else _kept(config.adapter)
        self._config = replace(config, bundle=_kept(config.bundle), adapter=adapter)
        self._note = hearing(on_note)
        self._chat: Chat | None = None
        self._answers = False  # meanwhile its messages must not change

    def __enter__(self) -> Self:
        from runtime.run.chat import Chat

        refuse_threads_and_forks()
        if self._chat is not None:
            raise UsageError("the conversation is open already; ondevice.chat begins another")

        self._chat = Chat(self._config, self._note).__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        chat, self._chat = self._open(), None
        chat.__exit__(kind, problem, traceback)

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """The conversation: the `role` and `content` of each message, the system's first.

        Raises UsageError outside of the `with` statement.
        """
        return tuple(dict(message) for message in self._open().messages)

    def say(self, text: str, *, on_text: Callable[[str], None] | None = None) -> Generation:
        """The model's answer to a message, which both join the conversation.

        on_text(piece) receives the answer as it grows. If it raises, the answer ends there, and
        stays in the conversation as far as it came.

        Raises:
            BudgetError: the budget is too small, or was passed.
            DataError: the bundle has no tokenizer or chat template.
            UsageError: the template refuses the message, or the conversation has become longer
                than its context: it is as it was before. Or this is outside of the `with`
                statement or the main thread, or inside of on_text.
        """
        refuse_threads_and_forks()
        turn = self._idle().say(text)
        self._answers = True
        try:
            with closing(iter(turn)) as answer:
                for piece in answer:
                    if on_text is not None and piece:
                        on_text(piece)
        finally:
            self._answers = False
        return turn.result

    def reset(self) -> None:
        """Forget the conversation, but for the system's message.

        Raises UsageError outside of the `with` statement, and inside of on_text.
        """
        self._idle().reset()

    def _idle(self) -> Chat:
        chat = self._open()
        if self._answers:
            raise UsageError("the conversation is answering: on_text can neither say nor reset")
        return chat

    def _open(self) -> Chat:
        if self._chat is None:
            raise UsageError(
                "the conversation is not open: with ondevice.chat(config) as conversation: ..."
            )
        return self._chat


def _kept(path: str) -> str:
    """The path as the first answer may read it, wherever the program works by then.

    One that leads nowhere stays as it was given, for the refusal: it may be an id of the hub.
    """
    return str(Path(path).absolute()) if Path(path).exists() else path
