"""`ondevice chat`, driven by its input: answers, the cache between turns, and interruptions."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from support.text_bundle import text_bundle
from support.token_rows import EOS, ids, make_tokenizer

from ondevice.cli.main import main
from runtime.bundle.store import Bundle
from runtime.run.decoder import Decoder
from runtime.run.sampling import Sampling
from tests.oracles import whole_model as reference

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
        self.model = reference.dense_model(bundle)
        self.text = f"s: {system}\n" if system else ""

    def answer(self, said: str) -> str:
        self.text += f"u: {said}\na: "
        tokens = ids(self.text)
        for _ in range(MOST):
            token = int(mx.argmax(self.model(mx.array(tokens)[None])[0, -1]).item())
            if token == EOS:
                break
            tokens.append(token)
        shown = str(make_tokenizer().decode(tokens)).removeprefix(
            str(make_tokenizer().decode(ids(self.text)))
        )
        self.text += f"{shown}\n"
        return shown


def chat(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, lines: Sequence[str], *options: str
) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", str(bundle.path), "--max-tokens", str(MOST), *options])


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
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    read: list[int],
) -> None:
    conversation = Conversation(bundle, "dog")
    said = ["the cat", "and then"]
    wanted = [conversation.answer(one) for one in said]
    again = Conversation(bundle, "dog").answer("once more")
    lines = ["the cat", "", "and then", "/reset", "once more", "/exit", "never"]
    assert chat(bundle, monkeypatch, lines, "--system", "dog", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in found] == ["the cat", "and then", "once more"]
    assert [one["text"] for one in found] == [*wanted, again]
    assert all(one["peak_footprint_bytes"] <= one["budget_bytes"] for one in found)
    first, second, third = (one["prompt_tokens"] for one in found)
    prompts = [count for count in read if count > 1]
    assert prompts[0] == first
    assert sum(prompts[1:]) <= second - first + third  # what both turns share is read once


def test_answers_go_to_stdout_and_the_rest_to_stderr(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Conversation(bundle).answer("hello")
    assert chat(bundle, monkeypatch, ["hello"]) == 0  # the end of the input ends it
    said = capsys.readouterr()
    assert said.out == f"{wanted}\n"
    assert f"(cut after {MOST} tokens: --max-tokens)" in said.err
    assert "the last answer: " in said.err and "peak footprint" in said.err


def test_ctrl_c_interrupts_an_answer_and_no_more(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = Sampling.choose, []

    def choose(self: Sampling, logits: Any, position: int) -> int:
        calls.append(position)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(self, logits, position)

    monkeypatch.setattr(Sampling, "choose", choose)
    whole = Conversation(bundle).answer("hello")
    assert chat(bundle, monkeypatch, ["hello", "again"], "--json") == 0
    said = capsys.readouterr()
    first, second = (json.loads(line) for line in said.out.splitlines())
    assert whole.startswith(first["text"]) and first["generated_tokens"] == 3
    assert "(interrupted)" in said.err and second["generated_tokens"] > 0


def test_a_full_context_is_said_and_can_be_left(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["hello", "the cat sat on the mat and then " * 3, "/reset", "hello"]
    assert chat(bundle, monkeypatch, lines, "--context", "40", "--json") == 2
    said = capsys.readouterr()
    first, last = (json.loads(line) for line in said.out.splitlines())
    assert first["text"] == last["text"]
    assert "tokens, and its context holds 40: begin again (/reset), or give a larger" in said.err


def test_a_full_model_is_said(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(bundle, monkeypatch, ["z" * 1100], "--context", "5000") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "the conversation may have 1024 tokens, not 5000 (--context): the model was" in said.err
    assert "and the model was made for 1024: begin again (/reset)\n" in said.err


def test_ctrl_c_interrupts_the_reading_of_a_long_prompt(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    assert chat(bundle, monkeypatch, [long, "again"], "--json") == 0
    said = capsys.readouterr()
    first, second = (json.loads(line) for line in said.out.splitlines())
    assert first["generated_tokens"] == 0 and first["stopped"] == ""
    assert second["text"] == wanted and "(interrupted)" in said.err
    assert len(counts) > 1  # the rest was read for the second answer


def test_what_is_no_text_is_refused_and_the_conversation_goes_on(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(bundle)
    wanted = [conversation.answer(one) for one in ("hello", "again")]
    assert chat(bundle, monkeypatch, ["hello", "a\udcff", "again"]) == 2
    said = capsys.readouterr()
    assert said.out.splitlines() == wanted
    assert "the prompt 'a\\udcff' is not valid UTF-8" in said.err
    assert said.err.endswith("1 of 3 messages got no answer, as was said for each\n")


def test_a_command_that_there_is_not_is_no_message(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(bundle)
    wanted = [conversation.answer(one) for one in ("hello", "/reset again")]
    lines = ["hello", "/Reset now", "//reset again"]
    assert chat(bundle, monkeypatch, lines) == 2
    said = capsys.readouterr()
    assert said.out.splitlines() == wanted
    assert (
        "there is no command '/Reset': /exit ends the conversation, /reset forgets it" in said.err
    )
    assert "is written with //\n" in said.err and "not 4096 (--context)" in said.err
    assert said.err.endswith("1 of 3 messages got no answer, as was said for each\n")


def test_a_refused_line_at_a_terminal_is_no_failure(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Typed("/what\n"))
    assert main(["chat", str(bundle.path), "--context", "64"]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "there is no command '/what'" in said.err
    assert "--context" not in said.err


class Typed(io.StringIO):
    """Lines from a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_sign_for_input_does_not_mix_with_output_to_a_file(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Typed("hello\n"))
    assert main(["chat", str(bundle.path), "--max-tokens", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["prompt"] == "hello"
    assert said.err.count("> ") == 2
