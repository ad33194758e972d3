"""Greedy generation: the dense model's own choices, where it begins and where it ends."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from support.bundles import settings
from support.checkpoints import weights_of, write_folder
from support.text_bundle import text_bundle
from support.token_rows import BOS, ids, make_tokenizer, write_tokenizer

import runtime.data.text_encoder
from export.pack import export_bundle
from harness.oracles import reference
from ondevice.bundle.store import Bundle
from ondevice.cli.main import main
from ondevice.errors import DataError, UsageError
from runtime.data.chat import ChatTemplate
from runtime.data.prompts import Prompt, chat_prompt
from runtime.data.text_encoder import load_encoder
from runtime.run.generate import generate

TEMPLATE = "Q: {{ messages[0].content }}\n{% if add_generation_prompt %}\nA: {% endif %}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny random model of the small tokenizer's vocabulary."""
    return text_bundle(tmp_path_factory.mktemp("generate"), TEMPLATE)


def continued(bundle: Bundle, tokens: list[int], count: int) -> list[int]:
    """`count` tokens that the dense model finds most likely, one after the other."""
    model = reference.dense_model(bundle)
    said = list(tokens)
    for _ in range(count):
        said.append(int(mx.argmax(model(mx.array(said)[None])[0, -1]).item()))
    return said[len(tokens) :]


def text_of(tokens: list[int]) -> str:
    return str(make_tokenizer().decode(tokens))


def test_it_says_what_the_dense_model_would(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [BOS, *ids("the cat ")]
    wanted = text_of(prompt + continued(bundle, prompt, 12)).removeprefix(text_of(prompt))
    pieces = list(generate(str(bundle.path), "the cat ", None, 12))
    assert "".join(pieces) == wanted and len(pieces) == 12
    command = ["generate", str(bundle.path), "--prompt", "the cat ", "--max-tokens", "12"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{wanted}\n"


def test_a_chat_is_answered_by_the_template(bundle: Bundle) -> None:
    prompt = ids("Q: cat\nA: ")  # no token but those that the template writes
    tokens = continued(bundle, prompt, 6)
    path = str(bundle.path)
    wanted = text_of(prompt + tokens).removeprefix(text_of(prompt))
    assert "".join(generate(path, "cat", None, 6, chat=True)) == wanted
    assert ChatTemplate(bundle.tokenizer_path).ending == ""


@pytest.fixture
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are rendered in this process, where a test can change what they say."""

    def prompt(folder: Path, messages: object) -> Prompt:
        return chat_prompt(runtime.data.text_encoder.load_encoder(folder), messages)

    monkeypatch.setattr("runtime.run.generate.confined_prompt", prompt)


@pytest.mark.usefixtures("rendered_here")
@pytest.mark.parametrize("length", [1, 2])
def test_an_answer_ends_where_the_template_ends_it(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """An ending of ordinary tokens is not shown, and ends nothing before it is whole."""
    prompt = ids("Q: cat\nA: ")
    whole = text_of(prompt + continued(bundle, prompt, 12)).removeprefix(text_of(prompt))
    ending = whole[5 : 5 + length]
    monkeypatch.setattr(ChatTemplate, "ending", property(lambda self: ending))
    pieces = list(generate(str(bundle.path), "cat", None, 12, chat=True))
    assert "".join(pieces) == whole[: whole.index(ending)]
    monkeypatch.setattr(ChatTemplate, "ending", property(lambda self: whole[-1:] + "#"))
    assert "".join(generate(str(bundle.path), "cat", None, 12, chat=True)) == whole


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
        assert "".join(generate(str(bundle.path), "cat", None, 6, chat=True)) == wanted


def test_ends_are_those_of_the_checkpoint(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle.tokenizer_path, folder / "tokenizer")
    for given, found in ((7, {7}), (0, {0}), ([7, 9], {7, 9}), (None, set())):
        config = json.dumps({"eos_token_id": given})
        (folder / "tokenizer" / "generation_config.json").write_text(config)
        assert load_encoder(folder).ends == found


def test_it_ends_with_the_longest_bucket_and_refuses_what_does_not_fit(bundle: Bundle) -> None:
    assert len(list(generate(str(bundle.path), "the", None, 1000))) <= 30
    with pytest.raises(UsageError, match="the bundle's longest is 32"):
        list(generate(str(bundle.path), "a" * 40, None, 1))


def test_without_a_tokenizer_or_template_it_says_so(bundle: Bundle, tmp_path: Path) -> None:
    config, arrays = weights_of("tiny-qwen2")
    bare = export_bundle(settings(write_folder(tmp_path / "m", config, arrays), tmp_path / "b"))
    with pytest.raises(DataError, match="has no tokenizer"):
        list(generate(str(bare.path), "a", None, 1))
    write_tokenizer(tmp_path / "m", {})
    plain = export_bundle(settings(tmp_path / "m", tmp_path / "p"))
    assert len(list(generate(str(plain.path), "a", None, 1))) == 1
    with pytest.raises(DataError, match="has no chat template"):
        list(generate(str(plain.path), "a", None, 1, chat=True))
