"""Tokens and templates are found where AutoTokenizer finds them, over layouts of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.token_rows import make_tokenizer

from runtime.core.errors import DataError
from runtime.data.chat import ChatTemplate
from runtime.data.text_encoder import load_encoder
from runtime.data.tokenizer_files import (
    FLAGS,
    added_in,
    numbered,
    special_of,
    templates_of,
    tokenizer_files,
)

TEXT = "the<bos> the <new>x<eos><other>  <pad>\n<image> <end>"
MESSAGES = [{"role": "user", "content": "q"}]
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def token(content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    stated = {**dict.fromkeys(FLAGS, False), **flags}
    return {"content": content, "special": special, **stated}


def added(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


NAMED = {"bos_token": "<bos>", "eos_token": "<eos>"}
DECODER = {"0": token("<bos>"), "1": token("<eos>"), "101": token("<new>")}
TOOL_USE = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


def config(**fields: object) -> dict[str, object]:
    return {"tokenizer_config.json": fields}


def in_map(**fields: object) -> dict[str, object]:
    return {"special_tokens_map.json": fields}


LAYOUTS: dict[str, dict[str, object]] = {
    "names in the configuration": config(**NAMED),
    "a token as an object": config(eos_token=added("<eos>")),
    "an object with flags": config(eos_token=added("<end>", lstrip=True)),
    "a list with numbers": config(**NAMED, added_tokens_decoder=DECODER),
    "the list has other flags": config(
        added_tokens_decoder={"1": token("<eos>", False, lstrip=True)}
    ),
    "named, and not special in the list": config(
        eos_token="<new>", added_tokens_decoder={"101": token("<new>", False)}
    ),
    "the list has other numbers": config(added_tokens_decoder={"200": token("<new>")}),
    "the list silences the map": {
        **config(**NAMED, added_tokens_decoder=DECODER), **in_map(eos_token="<other>"),
    },
    "a map alone": in_map(eos_token="<eos>", pad_token="<pad>"),
    "the map wins": {**config(**NAMED), **in_map(eos_token=token("<new>"))},
    "added tokens": {
        **config(eos_token="<other>"),
        "added_tokens.json": {"<new>": 102, "<other>": 101, "<eos>": 1},
    },
    "extra tokens": config(extra_special_tokens=["<new>", "<eos>"]),
    "extra tokens by name": config(extra_special_tokens={"image_token": "<image>"}),
    "additional tokens": config(additional_special_tokens=[added("<new>"), "<other>"]),
    "additional tokens in the map": in_map(additional_special_tokens=["<new>"]),
    "extra tokens in the map": {
        **config(extra_special_tokens=["<new>"]),
        **in_map(extra_special_tokens=["<other>", {"content": "<end>"}]),
    },
    "names of the model's own": config(image_token="<image>", sep_token="<other>"),
    "names of transformers 5": config(model_specific_special_tokens={"image_token": "<image>"}),
    "a name without a token": {
        **config(eos_token=None, pad_token="<pad>"), **in_map(bos_token="<bos>"),
    },
    "a template": config(chat_template="own {{ bos_token }}", **NAMED),
    "templates by name": config(chat_template=TOOL_USE),
    "a template in a file": {
        **config(chat_template=TOOL_USE),
        **in_map(image_token="<image>"),
        "chat_template.jinja": "file {{ image_token }}",
    },
    "more templates in files": {
        "chat_template.jinja": "file",
        "additional_chat_templates/tool_use.jinja": "file for tools",
    },
}  # fmt: skip


@pytest.fixture(params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A bundle with a tokenizer in one of the layouts."""
    files = dict(LAYOUTS[request.param])
    files["tokenizer_config.json"] = {**CLASS, **files.get("tokenizer_config.json", {})}  # type: ignore[dict-item]
    return written(tmp_path / "bundle", {**files, "config.json": {"model_type": "llama"}})


def written(bundle: Path, files: dict[str, Any]) -> Path:
    (bundle / "tokenizer").mkdir(parents=True)
    make_tokenizer().save(str(bundle / "tokenizer" / "tokenizer.json"))
    for name, content in files.items():
        path = bundle / "tokenizer" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return bundle


def test_tokens_and_templates_are_those_of_autotokenizer(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder / "tokenizer"), load_encoder(folder)
    assert ours.eos == theirs.eos_token_id
    assert ours.encode(TEXT) == theirs.encode(TEXT, add_special_tokens=False)
    special = {n for n, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special == special and ours.size == len(theirs)
    files = tokenizer_files(folder / "tokenizer")
    assert special_of(files).named == theirs.special_tokens_map
    if theirs.chat_template is None:
        assert not ours.has_template
        return
    chat = ChatTemplate(folder / "tokenizer")
    for tools in (None, TOOLS):
        text = theirs.apply_chat_template(
            MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert chat.prompt(MESSAGES, tools) == text


def test_numbers_of_tokens_are_told_without_the_tokenizer(folder: Path) -> None:
    """As an export tells them, which loads no tokenizer."""
    files = tokenizer_files(folder / "tokenizer")
    whole = json.loads(files["tokenizer.json"])
    there = added_in(whole["added_tokens"])
    found = numbered(special_of(files), whole["model"]["vocab"], there)
    encoder = load_encoder(folder)
    for one in found:
        assert encoder.encode(one.content) == [one.number]
    assert {one.number for one in found if one.special} == encoder.special


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    only = written(tmp_path / "only", {"additional_chat_templates/tool_use.jinja": "tools"})
    assert templates_of(tokenizer_files(only / "tokenizer")) == {"tool_use": "tools"}
    with pytest.raises(DataError, match="it has only tool_use, and none named default"):
        ChatTemplate(only / "tokenizer")
