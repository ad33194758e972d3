"""Our scored tokens beside those of TRL's assistant-only loss, with TRL's own copies of templates.

TRL replaces a model's template by a variant that marks the answers, and takes the mask from
transformers. Read with the variant, our rows must be TRL's. Read with the model's own template,
which marks nothing, they must have the same answers, without the white space around them: TRL also
scores what the template writes after the end of a turn, and with Qwen2.5 the line break before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.bundles import Rng
from support.chat_encoders import CALLED, CLOCK, SYSTEM, TWO, chat_encoder, said, scored_texts
from support.lengths import at_length

from runtime.data.fields import Conversation
from runtime.data.loss_mask import Row, row_of
from runtime.data.text_encoder import TextEncoder

TEMPLATES = Path(__file__).parents[2] / "support" / "trl_templates"
CHATML = ["<|im_start|>", "<|im_end|>"]
SPECIAL = {
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "phi3": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_instruct_2507": CHATML,
}
WITH_SYSTEM = {*SPECIAL} - {"gemma"}
WITH_TOOLS = {"qwen2_5", "qwen3", "qwen3_instruct_2507"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], object]] = {
    "one turn": (TWO[:2], None),
    "two turns": (TWO, None),
    "three turns": ([*TWO, *said("x?", "no")], None),
    "system": ([SYSTEM, *TWO], None),
    "empty answers": (said("x?", "", "y?", "no", "z?", ""), None),
    "white space": (said(" x?\n", "  yes\n\nno", "y?", "no\n"), None),
    "ends with the user": (TWO[:3], None),
    "calls": (CALLED, None),
    "tools and calls": ([SYSTEM, *CALLED, *said("thanks", "ok")], [CLOCK]),
}


def takes(name: str, messages: list[dict[str, Any]], tools: object) -> bool:
    roles = {message["role"] for message in messages}
    return ("system" not in roles or name in WITH_SYSTEM) and (
        not (tools or "tool" in roles) or name in WITH_TOOLS
    )


CASES = [
    (name, what)
    for name in SPECIAL
    for what, (messages, tools) in CONVERSATIONS.items()
    if takes(name, messages, tools)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokenizers are."""
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def encoders(folder: Path) -> dict[str, TextEncoder]:
    """By the name of a file: each model's own template, and TRL's variant."""
    return {
        file: chat_encoder(folder / file, source(file), special)
        for name, special in SPECIAL.items()
        for file in (name, f"{name}_training")
    }


def source(file: str) -> str:
    return (TEMPLATES / f"{file}.jinja").read_text()


def theirs(folder: Path, name: str, messages: object, tools: object) -> Row:
    """What TRL trains on: ids and assistant masks of its variant, from transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / f"{name}_training" / "tokenizer" / "tokenizer.json"),
        bos_token="<bos>",
        eos_token="<eos>",
    )
    found = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=source(f"{name}_training"),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return Row(found["input_ids"], bytes(found["assistant_masks"]))


def ours(encoder: TextEncoder, messages: object, tools: object, loss_on: str = "assistant") -> Row:
    return row_of(Conversation(messages, tools), encoder, loss_on, True)


# the end of the whole text, which Phi-3 writes after the last message: ours is the last answer,
# since what follows it teaches nothing
ENDS_EARLIER = {("phi3", "ends with the user")}


@pytest.mark.parametrize(("name", "what"), [case for case in CASES if case not in ENDS_EARLIER])
def test_with_their_template_our_row_is_theirs(
    encoders: dict[str, TextEncoder], folder: Path, name: str, what: str
) -> None:
    """And with the model's own the answers are, without the white space around them."""
    messages, tools = CONVERSATIONS[what]
    wanted = theirs(folder, name, messages, tools)
    found = ours(encoders[f"{name}_training"], messages, tools)
    kept = len(found.tokens)
    assert found.tokens == wanted.tokens[:kept] and found.scored == wanted.scored[:kept]
    assert any(found.scored) and not any(wanted.scored[kept:])
    answers = without_space(name, wanted, encoders[f"{name}_training"])
    for loss_on, expected in (("assistant", answers), ("last", answers[-1:])):
        own = ours(encoders[name], messages, tools, loss_on)
        assert without_space(name, own, encoders[name]) == expected


def without_space(name: str, row: Row, encoder: TextEncoder) -> list[str]:
    """The answers; TRL's Qwen3 keeps a place for reasoning in all of them, Qwen3's own in one."""
    texts = [text.strip() for text in scored_texts(encoder, row)]
    if name == "qwen3":
        texts = [text.removeprefix("<think>\n\n</think>\n\n").strip() for text in texts]
    return texts


@at_length("draws", 20, 400)
def test_random_conversations_too(
    encoders: dict[str, TextEncoder], folder: Path, rng: Rng, draws: int
) -> None:
    words = ["the", "cat", "a", "\n", "  ", "yes", "", "?", "12", "<x>", "{", "Probe0"]
    for _ in range(draws):
        name = str(rng.choice(list(SPECIAL)))
        # no line break first: TRL lets a token reach from the prompt into the answer, we do not
        texts = [" ".join(rng.choice(words, rng.integers(1, 6))).lstrip() for _ in range(6)]
        messages = said(*texts[: 2 * rng.integers(1, 4)])
        if name in WITH_SYSTEM and rng.random() < 0.5:
            messages = [SYSTEM, *messages]
        print(name, messages)
        wanted = theirs(folder, name, messages, None)
        found = ours(encoders[f"{name}_training"], messages, None)
        assert (found.tokens, found.scored) == (wanted.tokens, wanted.scored)
        own = ours(encoders[name], messages, None)
        assert without_space(name, own, encoders[name]) == without_space(
            name, wanted, encoders[f"{name}_training"]
        )
        length = int(rng.integers(1, found.predicted_tokens + 1))
        cut = found.shortened(length)  # as TRL cuts: ids and mask alike
        assert (cut.tokens, cut.scored) == (
            wanted.tokens[: length + 1],
            wanted.scored[: length + 1],
        )
