"""Greedy generation: the dense model's own choices, where it begins and where it ends."""

from __future__ import annotations

import json
import shutil
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from support.bundles import copied, say, settings
from support.checkpoints import weights_of, write_folder
from support.generation import continued, generating, pieces
from support.text_bundle import text_bundle, text_checkpoint
from support.token_rows import BOS, SPECIAL, VOCAB, ids, make_tokenizer, write_tokenizer

import ondevice
from export.bundle import export_bundle
from ondevice.cli.main import main
from runtime.bundle.store import Bundle
from runtime.config.generate import ChatConfig
from runtime.core.errors import DataError, UsageError
from runtime.data.chat import ChatTemplate
from runtime.data.text_encoder import load_encoder
from runtime.run.chat import Chat
from runtime.run.generate import Generating

TEMPLATE = "Q: {{ messages[0].content }}\n{% if add_generation_prompt %}\nA: {% endif %}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny random model of the small tokenizer's vocabulary."""
    return text_bundle(tmp_path_factory.mktemp("generate"), TEMPLATE)


def text_of(tokens: list[int]) -> str:
    return str(make_tokenizer().decode(tokens))


def answer(bundle: Bundle, prompt: list[int], count: int) -> str:
    """The text of so many tokens that the dense model adds to a prompt."""
    return text_of(prompt + continued(bundle, prompt, count)).removeprefix(text_of(prompt))


def test_it_says_what_the_dense_model_would(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = answer(bundle, [BOS, *ids("the cat ")], 12)
    found = list(pieces(bundle, "the cat ", None, 12))
    assert "".join(found) == wanted and len(found) == 12
    command = ["generate", str(bundle.path), "--prompt", "the cat ", "--max-tokens", "12"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{wanted}\n"


def test_a_chat_is_answered_by_the_template(bundle: Bundle) -> None:
    wanted = answer(bundle, ids("Q: cat\nA: "), 6)  # no token but those that the template writes
    assert "".join(pieces(str(bundle.path), "cat", None, 6, chat=True)) == wanted
    assert ChatTemplate(bundle.path / "tokenizer").ending == ""


@pytest.mark.usefixtures("rendered_here")
@pytest.mark.parametrize("length", [1, 2])
def test_an_answer_ends_where_the_template_ends_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """An ending of ordinary tokens is not shown, and ends nothing before it is whole."""
    whole = answer(bundle, ids("Q: cat\nA: "), 12)
    ending = whole[5 : 5 + length]
    monkeypatch.setattr(ChatTemplate, "ending", property(lambda self: ending))
    found = list(pieces(bundle, "cat", None, 12, chat=True))
    assert "".join(found) == whole[: whole.index(ending)]
    monkeypatch.setattr(ChatTemplate, "ending", property(lambda self: whole[-1:] + "#"))
    assert "".join(pieces(bundle, "cat", None, 12, chat=True)) == whole


@pytest.mark.usefixtures("rendered_here")
def test_special_tokens_end_an_answer(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids("Q: cat\nA: ")
    tokens = continued(bundle, prompt, 6)
    for field in ("special", "ends"):
        encoder = load_encoder(bundle.path)
        changed = replace(encoder, **{field: frozenset(tokens[4:5])})
        monkeypatch.setattr(
            "runtime.data.text_encoder.load_encoder", lambda folder, made=changed: made
        )
        ending = text_of(tokens[4:5]) + "more" if field == "special" else ""
        monkeypatch.setattr(ChatTemplate, "ending", property(lambda self, text=ending: text))
        before = tokens[: tokens.index(tokens[4])]
        wanted = text_of(prompt + before).removeprefix(text_of(prompt))
        assert "".join(pieces(bundle, "cat", None, 6, chat=True)) == wanted


def test_ends_are_those_of_the_checkpoint(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle.path / "tokenizer", folder / "tokenizer")
    for given, found in ((7, {7}), (0, {0}), ([7, 9], {7, 9}), (None, set())):
        config = json.dumps({"eos_token_id": given})
        (folder / "tokenizer" / "generation_config.json").write_text(config)
        assert load_encoder(folder).ends == found


def test_an_end_beyond_the_vocabulary_is_said(tmp_path: Path) -> None:
    source = text_checkpoint(tmp_path / "model", TEMPLATE)
    write_tokenizer(source, {**SPECIAL, "eos_token": None})
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB}))
    bundle = export_bundle(settings(source, tmp_path / "bundle"))
    said: list[str] = []
    config = ondevice.GenerateConfig(bundle=str(bundle.path), prompt="the", max_tokens=1)
    deque(Generating(config, said.append), maxlen=0)
    told = f"an answer ends at token {VOCAB}, and the model embeds {VOCAB}: each goes on"
    assert len([text for text in said if told in text]) == 1, said


def test_a_sequence_is_no_longer_than_the_model_was_made_for(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is longer than the longest sequence bucket, of 32 tokens."""
    prompt = [BOS, *ids("the cat ")]
    wanted = answer(bundle, prompt, 50)
    long = generating(bundle, "the cat ", max_tokens=50)
    assert "".join(long) == wanted
    assert long.result.stopped == "max_tokens" and long.result.generated_tokens == 50
    short = say(copied(bundle, tmp_path / "short"), "config/max_position_embeddings", 20)
    command = ["generate", str(short), "--prompt", "the cat ", "--json"]
    assert main(command) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    room = 20 - len(prompt)
    assert found["stopped"] == "context" and found["generated_tokens"] == room
    assert f"the answer ends after {room} tokens, not 64" in said.err
    assert wanted.startswith(found["text"]) and found["prompt_tokens"] == len(prompt)
    with pytest.raises(UsageError, match="41 tokens; the model was made for sequences of at most"):
        list(pieces(short, "a" * 40, None, 1))
    scaling = {"short_factor": [1], "long_factor": [2], "original_max_position_embeddings": 10}
    original = say(short, "config/rope_scaling", {"rope_type": "longrope", **scaling})
    with pytest.raises(UsageError, match=r"at most 10 \(original_max_position_embeddings\)"):
        list(pieces(original, "a" * 40, None, 1))


def test_speeds_and_memory_are_shown_on_stderr(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(bundle.path), "--prompt", "the", "--max-tokens", "3"]) == 0
    said = capsys.readouterr()
    assert "tokens of prompt, " in said.err and "3 tokens generated, " in said.err
    assert "tokens/s; peak footprint " in said.err
    assert said.err.endswith(", budget 1 GB; cut by --max-tokens\n")
    assert "tokens/s" not in said.out


def test_tokens_are_drawn_by_the_seed(bundle: Bundle) -> None:
    def said(seed: int, **more: float) -> str:
        return "".join(generating(bundle, "the", temperature=1.5, seed=seed, max_tokens=16, **more))

    assert said(1) == said(1) != said(2)
    greedy = "".join(generating(bundle, "the", max_tokens=16))
    assert said(1, top_k=1) == said(2, min_p=1) == said(3, top_p=1e-9) == greedy != said(1)
    with pytest.raises(
        UsageError, match=r"seed is 1844.*; it must be a whole number of at most 64"
    ):
        generating(bundle, "the", seed=1 << 64)
    with pytest.raises(UsageError, match="--top-p without --temperature"):
        generating(bundle, "the", top_p=0.5)


def test_characters_without_tokens_are_said_once(bundle: Bundle) -> None:
    said: list[str] = []
    config = ondevice.GenerateConfig(bundle=str(bundle.path), prompt="a Ж日<eos>", max_tokens=1)
    deque(Generating(config, said.append), maxlen=0)
    told = "ondevice: warning: the tokenizer has no token for {} in the prompt"
    assert said[-1:] == [told.format("'Ж', '日'")]
    said.clear()
    with Chat(ChatConfig(bundle=str(bundle.path), max_tokens=1), said.append) as chat:
        deque(chat.say("日本語です、か"), maxlen=0)
        chat.reset()
        deque(chat.say("日Ж"), maxlen=0)
    warned = [text for text in said if "no token" in text]
    assert warned == [told.format("'、', 'か', 'す', 'で', '日' and 2 more"), told.format("'Ж'")]


def test_an_error_of_the_caller_ends_the_measurement(bundle: Bundle) -> None:
    def fail(piece: str) -> None:
        raise RuntimeError(piece)

    with pytest.raises(RuntimeError) as found:  # whose frames stay in memory, as in a notebook
        ondevice.generate(
            ondevice.GenerateConfig(bundle=str(bundle.path), prompt="the"), on_text=fail
        )
    assert "footprint-meter" not in {one.name for one in threading.enumerate()}, found


def test_the_system_speaks_first(tmp_path: Path) -> None:
    template = "{% for one in messages %}{{ one.role[0] }}: {{ one.content }}\n{% endfor %}"
    bundle = text_bundle(tmp_path, template)
    wanted = answer(bundle, ids("s: dog\nu: cat\n"), 5)
    assert "".join(generating(bundle, "cat", chat=True, system="dog", max_tokens=5)) == wanted
    with pytest.raises(UsageError, match="give --chat"):
        generating(bundle, "cat", system="dog")


def test_a_budget_that_does_not_fit_is_refused(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(bundle.path), "--prompt", "the", "--budget", "1MB"]) == 3
    assert "the smallest that fits is" in capsys.readouterr().err


def test_without_a_tokenizer_or_template_it_says_so(bundle: Bundle, tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    folder, said = write_folder(tmp_path / "m", config, arrays), list[str]()
    bare = export_bundle(settings(folder, tmp_path / "b"), note=said.append)
    assert [text for text in said if "no tokenizer: data of text, generate and chat need" in text]
    said.clear()
    export_bundle(settings("random:tiny-qwen2", tmp_path / "random"), note=said.append)
    assert not said
    with pytest.raises(DataError, match="has no tokenizer"):
        list(pieces(bare, "a", None, 1))
    write_tokenizer(tmp_path / "m", {})
    plain = export_bundle(settings(tmp_path / "m", tmp_path / "p"))
    assert len(list(pieces(plain, "a", None, 1))) == 1
    with pytest.raises(
        DataError, match=r"has no chat template.* ondevice generate BUNDLE --prompt"
    ):
        list(pieces(plain, "a", None, 1, chat=True))
    with (
        pytest.raises(DataError, match="has no chat template"),
        Chat(ChatConfig(bundle=str(plain.path))),  # before anything is said
    ):
        pass
