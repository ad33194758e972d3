"""Which tokens of a conversation are scored, for templates of the kinds that models come with.

The templates in `tests/support/chat_templates` write conversations as those of the named models do.
What is expected was written by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bundles import Rng
from support.chat_encoders import CALLED, CLOCK, SYSTEM, TWO, chat_encoder, said, scored_texts
from support.token_rows import make_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from runtime.data.fields import Conversation
from runtime.data.loss_mask import crossed, row_of
from runtime.data.text_encoder import TextEncoder, load_encoder

TEMPLATES = Path(__file__).parents[2] / "support" / "chat_templates"
SPECIAL = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "marked": ["<|im_start|>", "<|im_end|>"],
    "qwen2_5": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}
END = {name: tokens[-1] for name, tokens in SPECIAL.items()} | {"mistral": "<eos>"}
SAY = {"mistral": " "}  # written before an answer's text, after the prompt has ended
THINK = {"qwen3": "<think>\n\n</think>\n\n"}  # written before the last answer alone


@pytest.fixture(params=SPECIAL)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def encoder(tmp_path: Path, name: str) -> TextEncoder:
    return chat_encoder(tmp_path, (TEMPLATES / f"{name}.jinja").read_text(), SPECIAL[name])


def read(
    encoder: TextEncoder, messages: object, loss_on: str = "assistant", **more: Any
) -> list[str]:
    return scored_texts(encoder, row_of(Conversation(messages, **more), encoder, loss_on, True))


def answers(name: str, *texts: str) -> list[str]:
    """What is expected to be scored of answers, the last of which is the conversation's last."""
    before, thought, end = SAY.get(name, ""), THINK.get(name, ""), END[name]
    earlier = [f"{before}{text}{end}" for text in texts[:-1]]
    return [*earlier, *(f"{before}{thought}{text}{end}" for text in texts[-1:])]


@pytest.mark.parametrize(
    ("messages", "more", "texts"),
    [
        (TWO, {}, ("yes", "no")),
        (TWO[:2], {}, ("yes",)),
        ([*TWO, *said("x?", "no")], {}, ("yes", "no", "no")),  # answers may be equal
        (TWO, {"loss_on": "last"}, ("no",)),
        ([SYSTEM, *TWO], {}, ("yes", "no")),  # which Mistral writes into the last question
        (said("x?", "", "y?", "no"), {}, ("", "no")),  # empty answers are their ending
        (said("x?", "yes", "y?", ""), {}, ("yes", "")),
        (TWO[:3], {}, ("yes",)),  # it ends with the user
        (TWO[:1], {}, ()),
        (TWO, {"first": 2}, ("no",)),  # a completion of messages
    ],
)
def test_answers_are_scored_with_the_token_that_ends_each(
    encoder: TextEncoder, name: str, messages: Any, more: dict[str, Any], texts: tuple[str, ...]
) -> None:
    assert read(encoder, messages, **more) == answers(name, *texts)


def test_all_tokens(encoder: TextEncoder, name: str) -> None:
    row = row_of(Conversation(TWO), encoder, "all")
    assert row.scored == b"\0" + b"\1" * (len(row.tokens) - 1)


def test_a_cut_answer_has_no_ending(encoder: TextEncoder, name: str) -> None:
    """Whatever the length, an ending is scored only where its answer is whole."""
    row = row_of(Conversation(TWO), encoder, "assistant")
    whole = answers(name, "yes", "no")
    for length in range(1, row.predicted_tokens + 1):
        runs = scored_texts(encoder, row.shortened(length))
        assert runs[:-1] == whole[: max(0, len(runs) - 1)]
        assert not runs or whole[len(runs) - 1].startswith(runs[-1])
        if row.shortened(length).cut and runs:
            cut_off = runs[-1] != whole[len(runs) - 1]
            assert cut_off == (not runs[-1].endswith(END[name]))


ARGUMENTS = '{"zone": "CET"}'
WRITTEN = {
    # the white space before a call is the template's, and what a model has to write
    "qwen2_5": ['<tool_call>\n{"name": "clock", "arguments": ' + ARGUMENTS + "}\n</tool_call>"],
    "llama3": ['{"name": "clock", "parameters": ' + ARGUMENTS + "}"],
    "mistral": ['[TOOL_CALLS] [{"name": "clock", "arguments": ' + ARGUMENTS + "}]"],
}


@pytest.mark.parametrize("name", WRITTEN, indirect=True)
@pytest.mark.parametrize("tools", [None, [CLOCK]])
def test_tool_calls_are_scored_and_results_are_not(
    encoder: TextEncoder, name: str, tools: object
) -> None:
    row = row_of(Conversation(CALLED, tools), encoder, "assistant")
    assert scored_texts(encoder, row) == [WRITTEN[name][0] + END[name], *answers(name, "noon")]
    lost = tools is not None and name == "llama3"  # whose template here writes no tools
    assert row.warnings == ((encoder.chat().name + " does not write the row's tools",) * lost)


@pytest.mark.parametrize("name", ["chatml"], indirect=True)
def test_calls_that_a_template_does_not_write_are_no_empty_answers(encoder: TextEncoder) -> None:
    row = row_of(Conversation(CALLED, [CLOCK]), encoder, "assistant")
    assert row.warnings == (f"{encoder.chat().name} does not write the row's tools",)
    assert row.dropped == f"{encoder.chat().name} does not write its tool calls"


@pytest.mark.parametrize("name", ["qwen3"], indirect=True)
def test_reasoning_that_a_template_drops_is_not_looked_for(encoder: TextEncoder) -> None:
    thought = "<think>\nhm\n</think>\n\n"
    messages = said("x?", thought + "yes", "y?", thought + "no")
    assert read(encoder, messages) == ["yes<|im_end|>", thought + "no<|im_end|>"]


@pytest.mark.parametrize("name", ["marked"], indirect=True)
def test_marked_answers_are_those_of_transformers(encoder: TextEncoder, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer" / "tokenizer.json")
    ).apply_chat_template(
        TWO,
        chat_template=(TEMPLATES / "marked.jinja").read_text(),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    row = row_of(Conversation(TWO), encoder, "assistant")
    assert row.tokens == theirs["input_ids"]
    assert list(row.scored) == theirs["assistant_masks"]


def test_the_prompt_of_an_answer_is_tokenized_as_a_model_is_given_it(
    encoder: TextEncoder, name: str
) -> None:
    row = row_of(Conversation(TWO), encoder, "assistant")
    prompt = encoder.encode(encoder.chat().prompt(TWO[:3]))
    assert row.tokens[: len(prompt)] == prompt


HARMONY = ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"]
FINAL = "<|channel|>final<|message|>"
THOUGHT = {"role": "assistant", "content": "yes", "thinking": "it shines"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (TWO, [f"{FINAL}yes<|end|>", f"{FINAL}no<|return|>"]),
        (TWO[:3], [f"{FINAL}yes<|return|>"]),  # the row ends there
        (
            [SYSTEM, TWO[0], THOUGHT],
            [
                "<|channel|>analysis<|message|>it shines<|end|>"
                f"<|start|>assistant{FINAL}yes<|return|>"
            ],
        ),
        (
            [*CALLED, *said("thanks", "ok")],
            [
                f" to=functions.clock<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
                f"{FINAL}noon<|end|>", f"{FINAL}ok<|return|>",
            ],
        ),
    ],
    ids=["two turns", "ends with the user", "thought", "call"],
)  # fmt: skip
def test_channels_of_harmony(
    tmp_path: Path, messages: list[dict[str, Any]], expected: list[str]
) -> None:
    """Its last answer ends with another token than the earlier ones."""
    template = (TEMPLATES / "harmony.jinja").read_text()
    assert read(chat_encoder(tmp_path, template, HARMONY), messages) == expected


NORMALIZERS = (None, normalizers.NFKC(), normalizers.Lowercase(), normalizers.Prepend("the"))
SPLITS = (
    make_tokenizer().pre_tokenizer,
    pre_tokenizers.ByteLevel(add_prefix_space=True),
    *(pre_tokenizers.Metaspace(prepend_scheme=each) for each in ("first", "always", "never")),
)
FLAGS = ({}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True})


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_text_is_cut_as_if_every_beginning_were_tokenized_whole(
    tmp_path: Path, rng: Rng, normalizer: Any, split: Any
) -> None:
    """Whatever borders do to the text around them, and whichever tokens may be none."""
    small = json.loads(make_tokenizer().to_str())["model"]
    vocab = {**small["vocab"], "<0": len(small["vocab"]), "<0>": len(small["vocab"]) + 1}
    merges = [*map(tuple, small["merges"]), ("<", "0"), ("<0", ">")]  # text may make a border's
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split
    names = [f"<{number}>" for number in range(len(FLAGS))] + ["<0><", "\n\n"]
    tokens = [AddedToken(name, **dict(flags)) for name, flags in zip(names, FLAGS, strict=False)]
    more = [AddedToken(name, normalized=False) for name in names[len(FLAGS) :]]
    tokenizer.add_special_tokens([*tokens, *more])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    encoder = load_encoder(tmp_path)
    assert {"<0>", "\n\n"} <= {encoder.name_of(token) for token in encoder.borders}
    assert not {"<3>", "<4>"} & {encoder.name_of(token) for token in encoder.borders}
    parts = [*names, *names, "the", "th", "e", " ", "  ", "\n", "<", "0>", "\uff1c0>", "T", "a b"]
    whole = 0
    for _ in range(40):
        text = "".join(rng.choice(parts, rng.integers(1, 20)))
        starts = range(1, len(text))
        tokens_there, places = encoder.encode_places(text)
        beginnings = {start: encoder.encode(text[:start]) for start in starts}
        expected = [
            start for start, alone in beginnings.items() if tokens_there[: len(alone)] != alone
        ]
        assert crossed(text, starts, tokens_there, places, encoder) == expected, text
        whole += len(starts) - len(expected)
    assert whole


def test_a_long_conversation_is_tokenized_about_once(tmp_path: Path) -> None:
    template = (TEMPLATES / "chatml.jinja").read_text()
    encoder = chat_encoder(tmp_path, template, SPECIAL["chatml"])
    sizes: list[int] = []

    def encode(text: str) -> list[int]:
        sizes.append(len(text))
        return encoder.encode(text)

    messages = said(*["how is the weather over there?" * 3, "as yesterday. " * 7] * 40)
    row = row_of(Conversation(messages), replace(encoder, encode=encode), "assistant")
    assert sum(row.scored) > 40 * 90
    assert sum(sizes) < 2 * len(row.tokens)
