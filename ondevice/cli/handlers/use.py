"""Handles the commands that use a model: eval, generate, chat, adapter and fuse."""

from __future__ import annotations

import signal
import sys
from collections import deque
from shlex import quote
from typing import TYPE_CHECKING

from ondevice.cli.handlers.common import print_json, set_up, show
from ondevice.cli.progress import task_bar
from ondevice.cli.screen import note, out
from runtime.core.errors import BundleError, InterruptedRunError, UsageError
from runtime.core.units import counted, format_bytes
from runtime.parallel.launch import speaks

if TYPE_CHECKING:
    from export.config.fuse import AdapterConfig, FuseConfig
    from runtime.config.evaluate import EvalConfig
    from runtime.config.generate import ChatConfig, GenerateConfig
    from runtime.run.chat import Chat, Turn


def run_eval(config: EvalConfig, as_json: bool) -> None:
    """Measure a bundle, or compare it with its checkpoint."""
    set_up()
    if config.source is not None:
        _eval_beside_source(config, as_json)
        return
    from ondevice.cli.describe import describe_task
    from runtime.run.evaluate import run_eval
    from runtime.run.results import Events

    with task_bar() as progress:
        result = run_eval(config, Events(evaluation=progress, note=note))
    if not speaks():
        return
    text = (
        f"{describe_task(result)}, over {counted(result.scored_tokens, 'token')} in "
        f"{counted(result.rows, 'row')}\n"
        f"peak footprint {format_bytes(result.peak_footprint_bytes)}, budget "
        f"{format_bytes(result.budget_bytes)}"
    )
    show(result, text, as_json)
    if result.loss is None:
        adapter = "" if config.adapter is None else f" with the adapter {config.adapter}"
        raise BundleError(
            f"{config.bundle}{adapter} gives {result.rows_not_finite} of {result.rows} rows "
            "a loss that is not finite: weights are not numbers, or too large; export the model "
            "again, or leave out the adapter"
        )


def _eval_beside_source(config: EvalConfig, as_json: bool) -> None:
    """Compare the bundle's predictions with those of the checkpoint that it came from."""
    from ondevice.api.use import beside_source

    with task_bar() as progress:
        quality = beside_source(config, progress, note)
    show(quality, quality.describe(), as_json)


ENDED = {
    "end": "the model ended it",
    "max_tokens": "cut by --max-tokens",
    "context": "cut where the model's context is full",
}


def run_generate(config: GenerateConfig, as_json: bool) -> None:
    """Continue a prompt."""
    set_up()
    from ondevice.cli.describe import describe_generation
    from runtime.run.generate import Generating

    generating = Generating(config, note)
    if as_json:
        deque(generating, maxlen=0)
        print_json(generating.result)
        return
    for piece in generating:
        out(piece, end="", is_data=True)
    out()
    result = generating.result
    note(f"{describe_generation(result)}; {ENDED[result.stopped]}")


EXIT, RESET = "/exit", "/reset"
SIGN = "/"  # with which commands begin; written twice, a message begins with it
SAID = f"{EXIT} ends the conversation, {RESET} forgets it"
AWAITED = "> "
GREETING = f"{SAID}, Ctrl-C interrupts an answer"


def run_chat(config: ChatConfig, as_json: bool) -> None:
    """Read a line, answer it, and read the next."""
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
                if turn := _turn(chat, line, as_json):
                    last, answered = turn, answered + 1
        if last is not None and not as_json:
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
        f"ondevice: there is no command {line.split()[0]!r:.80}: {SAID}; a message that begins "
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
    from runtime.core.signals import catching_signals

    with catching_signals() as stop:
        try:
            turn = chat.say(text)
        except UsageError as problem:
            note(f"ondevice: {problem}")
            return None
        for piece in turn:
            if not as_json:
                out(piece, end="", is_data=True)
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
        why = {"max_tokens": "--max-tokens", "context": "the context is full: --context"}
        note(f"(cut after {len(turn.answer.tokens)} tokens: {why[turn.answer.stopped]})")
    return turn


_LOADED_BY = {
    "peft": "PeftModel.from_pretrained(model, {output!r})",
    "gguf": "llama-cli -m MODEL.gguf --lora {output}",
    "mlx": "mlx_lm.generate --model {base} --adapter-path {output}",
}


def run_adapter(config: AdapterConfig, as_json: bool) -> None:
    """Write a trained adapter as other tools read it."""
    set_up()
    from ondevice.api.converting import convert

    result = convert(config, note)
    if as_json:
        print_json(result)
    else:
        out(f"{config.output}: {result.lora.describe()}; {result.tensors} tensors")
        shell = result.format != "peft"  # which is loaded in Python
        output = quote(str(config.output)) if shell else config.output
        base = quote(str(result.base_model))
        used = _LOADED_BY[result.format].format(output=output, base=base)
        out(f"to use it: {used}", is_data=True)


def run_fuse(config: FuseConfig, as_json: bool) -> None:
    """Add an adapter to its bundle's weights, and tell the cost."""
    set_up(keep_heap=False)
    from ondevice.api.fusing import fuse_as
    from ondevice.cli.describe import describe_fusing

    with task_bar() as progress:
        result = fuse_as(config, progress, note)
    count = result.adapted_matrices
    added = f" with {count} adapted matrices" if count else ""
    text = (
        f"{result.output}: {format_bytes(result.weights_bytes)} of weights{added}, peak footprint "
        f"{format_bytes(result.peak_footprint_bytes)}"
    )
    if result.quality is not None:
        text += f"\n{describe_fusing(result.quality, count > 0)}"
    show(result, text, as_json)
