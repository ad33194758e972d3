"""Handles `ondevice chat`: reads a line, answers it, and reads the next."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING

from ondevice.cli.handlers.common import configuration, print_json, set_up
from ondevice.cli.screen import note, out
from runtime.config.generate import ChatConfig
from runtime.core.errors import InterruptedRunError, UsageError
from runtime.core.units import counted

if TYPE_CHECKING:
    from runtime.run.chat import Chat, Turn

EXIT, RESET = "/exit", "/reset"
SIGN = "/"  # with which commands begin; written twice, a message begins with it
COMMANDS = f"{EXIT} ends the conversation, {RESET} forgets it"
AWAITED = "> "
GREETING = f"{COMMANDS}, Ctrl-C interrupts an answer"


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    config = configuration(ChatConfig, arguments)
    set_up()
    from ondevice.cli.describe import describe_generation
    from runtime.run.chat import Chat

    terminal = sys.stdin.isatty()
    if terminal:
        note(GREETING)
    with Chat(config, note) as chat:
        last = None
        asked = answered = 0
        while (line := _line(terminal)) is not None and line != EXIT:
            if line == RESET:
                chat.reset()
            elif line:
                asked += 1
                if turn := _turn(chat, line, arguments.json):
                    last, answered = turn, answered + 1
        if last is not None and not arguments.json:
            note(f"the last answer: {describe_generation(last.result)}")
    if answered < asked and not terminal:  # at a terminal each was seen
        raise UsageError(
            f"{asked - answered} of {counted(asked, 'message')} got no answer, as was said for each"
        )


def _turn(chat: Chat, line: str, as_json: bool) -> Turn | None:
    """Answer a line that is no known command; None if it was refused."""
    if not line.startswith(SIGN):
        return _answered(chat, line, as_json)
    if line.startswith(SIGN * 2):
        return _answered(chat, line.removeprefix(SIGN), as_json)
    note(
        f"ondevice: there is no command {line.split()[0]!r:.80}: {COMMANDS}; a message that begins "
        f"with {SIGN} is written with {SIGN * 2}"
    )
    return None


def _line(terminal: bool) -> str | None:
    """The next line that the user types, without white space around it; None at the end.

    The sign that it is awaited goes to stdout only where that is a terminal too.
    """
    if not terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401 - gives `input` its editing of lines

    shown = sys.stdout.isatty()
    if not shown:
        note(AWAITED, end="")
    try:
        return input(AWAITED if shown else "").strip()
    except EOFError:
        note("")  # the next output begins on a line of its own
        return None


def _answered(chat: Chat, text: str, as_json: bool) -> Turn | None:
    """Print the model's answer to a message; None if the message was refused."""
    from runtime.run.signals import catching_signals

    with catching_signals() as stop:
        try:
            turn = chat.say(text)
        except UsageError as problem:
            note(f"ondevice: {problem}")
            return None
        for piece in turn:
            if not as_json:
                out(piece, end="")
            if stop.signal is not None:
                break
    if as_json:
        print_json(turn.result)
    else:
        out()
    if stop.signal not in (None, signal.SIGINT):
        raise InterruptedRunError(f"{signal.Signals(stop.signal).name}: the conversation ended")
    if stop.signal is not None:
        note("(interrupted)")
    elif turn.answer.stopped != "end":
        note(f"(cut after {len(turn.answer.tokens)} tokens: {_why(turn)})")
    return turn


def _why(turn: Turn) -> str:
    return {"max_tokens": "--max-tokens", "context": "the context is full: --context"}[
        turn.answer.stopped
    ]
