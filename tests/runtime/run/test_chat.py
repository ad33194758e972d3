"""`ondevice chat`, driven by its input: answers, the cache between turns, and interruptions."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.generation import continued
from support.text_bundle import text_bundle
from support.token_rows import EOS, ids, make_tokenizer

from ondevice.cli.main import main
from runtime.bundle.store import Bundle
from runtime.run.decoder import Decoder
from runtime.run.sampling import Sampling

TEMPLATE = (
    "{% for one in messages %}{{ one.role[0] }}: {{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
MOST = 7  # tokens of an answer


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return text_bundle(tmp_path_factory.mktemp("chat"), TEMPLATE)


class Conversation:
    """What the dense model answers, turn after turn."""

    def __init__(self, bundle: Bundle, system: str = "") -> None:
        self.bundle = bundle
        self.text = f"s: {system}\n" if system else ""

    def answer(self, said: str) -> str:
        self.text += f"u: {said}\na: "
        before = ids(self.text)
        tokens = [*before, *continued(self.bundle, before, MOST, EOS)]
        decode = make_tokenizer().decode
        shown = str(decode(tokens)).removeprefix(str(decode(before)))
        self.text += f"{shown}\n"
        return shown


class Said(NamedTuple):
    """How a chat ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def answers(self) -> list[dict[str, Any]]:
        """What it wrote with --json."""
        return [json.loads(line) for line in self.out.splitlines()]


class Typed(io.StringIO):
    """Lines from a terminal."""

    def isatty(self) -> bool:
        return True


Chat = Callable[..., Said]


@pytest.fixture
def confined_chat(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Chat:
    """confined_chat(lines, *options): `ondevice chat` with these lines, from a file or typed."""

    def run(lines: Sequence[str], *options: str, source: type[io.StringIO] = io.StringIO) -> Said:
        monkeypatch.setattr("sys.stdin", source("".join(f"{line}\n" for line in lines)))
        code = main(["chat", str(bundle.path), "--max-tokens", str(MOST), *options])
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture
def chat(confined_chat: Chat, rendered_here: None) -> Chat:
    """The same, whose prompts are rendered in this process."""
    return confined_chat


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each reading has read."""
    counts: list[int] = []
    real = Decoder.read

    def counted(self: Decoder, tokens: Sequence[int]) -> Any:
        counts.append(len(tokens))
        return real(self, tokens)

    monkeypatch.setattr(Decoder, "read", counted)
    return counts


def test_each_line_is_answered_after_those_before(
    bundle: Bundle, chat: Chat, read: list[int]
) -> None:
    conversation = Conversation(bundle, "dog")
    wanted = [conversation.answer(line) for line in ("the cat", "and then")]
    again = Conversation(bundle, "dog").answer("once more")
    lines = ["the cat", "", "and then", "/reset", "once more", "/exit", "never"]
    said = chat(lines, "--system", "dog", "--json")
    assert said.code == 0
    assert [one["prompt"] for one in said.answers] == ["the cat", "and then", "once more"]
    assert [one["text"] for one in said.answers] == [*wanted, again]
    assert all(one["peak_footprint_bytes"] <= one["budget_bytes"] for one in said.answers)
    first, second, third = (one["prompt_tokens"] for one in said.answers)
    prompts = [count for count in read if count > 1]
    assert prompts[0] == first
    assert sum(prompts[1:]) <= second - first + third  # what both turns share is read once


def test_answers_go_to_stdout_and_the_rest_to_stderr(bundle: Bundle, confined_chat: Chat) -> None:
    wanted = Conversation(bundle).answer("hello")
    said = confined_chat(["hello"])  # the end of the input ends it
    assert (said.code, said.out) == (0, f"{wanted}\n")
    assert f"(cut after {MOST} tokens: --max-tokens)" in said.err
    assert "the last answer: " in said.err and "peak footprint" in said.err


def test_ctrl_c_interrupts_an_answer_and_no_more(
    bundle: Bundle, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Sampling.choose, []

    def choose(self: Sampling, logits: Any, position: int) -> int:
        calls.append(position)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(self, logits, position)

    monkeypatch.setattr(Sampling, "choose", choose)
    whole = Conversation(bundle).answer("hello")
    said = chat(["hello", "again"], "--json")
    first, second = said.answers
    assert said.code == 0 and "(interrupted)" in said.err
    assert whole.startswith(first["text"]) and first["generated_tokens"] == 3
    assert second["generated_tokens"] > 0


@pytest.mark.parametrize(
    ("template", "code", "told"),
    [
        ("{% for one in messages %}", 4, "; correct it in the checkpoint and export again, or"),
        ("{{ raise_exception('never') }}", 2, "never; no conversation can begin so: leave out --"),
    ],
)
def test_a_template_for_no_conversation_is_told_before_the_first_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    template: str,
    code: int,
    told: str,
) -> None:
    broken = text_bundle(tmp_path, template, seq_lens=(16,))
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert main(["chat", str(broken.path)]) == code
    said = capsys.readouterr().err
    assert told in said and "got no answer" not in said


def test_a_full_context_is_said_and_can_be_left(chat: Chat) -> None:
    lines = ["hello", "the cat sat on the mat and then " * 3, "/reset", "hello"]
    said = chat(lines, "--context", "40", "--json")
    first, last = said.answers
    assert said.code == 2 and first["text"] == last["text"]
    assert "tokens, and its context holds 40: begin again (/reset), or give a larger" in said.err


def test_a_full_model_is_said(chat: Chat) -> None:
    said = chat(["z" * 1100], "--context", "5000")
    assert (said.code, said.out) == (2, "")
    assert "the conversation may have 1024 tokens, not 5000 (--context): the model was" in said.err
    assert "and the model was made for 1024: begin again (/reset)\n" in said.err


def test_ctrl_c_interrupts_the_reading_of_a_long_prompt(
    bundle: Bundle, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, counts = Decoder.append, []

    def append(self: Decoder, part: list[int]) -> None:
        real(self, part)
        if not counts:
            signal.raise_signal(signal.SIGINT)
        counts.append(len(part))

    monkeypatch.setattr(Decoder, "append", append)
    long = "the cat " * 100
    conversation = Conversation(bundle)
    conversation.text = f"u: {long.strip()}\na: \n"
    wanted = conversation.answer("again")
    said = chat([long, "again"], "--json")
    first, second = said.answers
    assert said.code == 0 and "(interrupted)" in said.err
    assert first["generated_tokens"] == 0 and first["stopped"] == ""
    assert second["text"] == wanted
    assert len(counts) > 1  # the rest was read for the second answer


def test_what_is_no_text_is_refused_and_the_conversation_goes_on(
    bundle: Bundle, chat: Chat
) -> None:
    conversation = Conversation(bundle)
    wanted = [conversation.answer(line) for line in ("hello", "again")]
    said = chat(["hello", "a\udcff", "again"])
    assert said.code == 2 and said.out == "".join(f"{answer}\n" for answer in wanted)
    assert "the prompt 'a\\udcff' is not valid UTF-8" in said.err
    assert said.err.endswith("1 of 3 messages got no answer, as was said for each\n")


def test_a_command_that_there_is_not_is_no_message(bundle: Bundle, chat: Chat) -> None:
    conversation = Conversation(bundle)
    wanted = [conversation.answer(line) for line in ("hello", "/reset again")]
    said = chat(["hello", "/Reset now", "//reset again"])
    assert said.code == 2 and said.out == "".join(f"{answer}\n" for answer in wanted)
    assert (
        "there is no command '/Reset': /exit ends the conversation, /reset forgets it" in said.err
    )
    assert "is written with //\n" in said.err and "not 4096 (--context)" in said.err
    assert said.err.endswith("1 of 3 messages got no answer, as was said for each\n")


def test_a_refused_line_at_a_terminal_is_no_failure(chat: Chat) -> None:
    said = chat(["/what"], "--context", "64", source=Typed)
    assert (said.code, said.out) == (0, "") and "there is no command '/what'" in said.err
    assert "--context" not in said.err


def test_the_sign_for_input_does_not_mix_with_output_to_a_file(chat: Chat) -> None:
    said = chat(["hello"], "--json", source=Typed)
    (answer,) = said.answers
    assert said.code == 0 and answer["prompt"] == "hello"
    assert said.err.count("> ") == 2
