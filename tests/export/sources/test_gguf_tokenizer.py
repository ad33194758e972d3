"""GGUF vocabularies: the same ids as the vocabulary they came from, and texts that come back."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabularies import spm_metadata
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from export.sources.gguf_tokenizer import convert_tokenizer
from export.sources.open import open_checkpoint
from runtime.core.errors import BundleError

TEXTS = [
    "Hello world",
    "a   b      c",
    " leading and trailing  ",
    "x\n\n\ny\t\tz\r\n",
    "naïve 日本語 🙂 zażółć\u200b\x00",
    "def f(x):\n    return x  # 12345",
]

# the data folder lies in the repository or beside it
WIKITEXT = [
    parent / "shared" / "data" / "wikitext2" / "test.txt"
    for parent in Path(__file__).resolve().parents[3:5]
]
# better when longer, sometimes; no two alike, as in real vocabularies (a merge table ranks equal
# scores by id, SentencePiece by position)
SCORES = [0, -1, -2, -3, -4, -5, -3.5, -1, -2.5, -4.5, -0.5, -6.5, -7.5]


def load(files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(files["tokenizer.json"].decode())


def spm_reference(metadata: dict[str, Any], text: str) -> list[str]:
    """SentencePiece as defined: user symbols first, then the best-scoring neighbours, leftmost."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    score = {
        t: s
        for t, s, k in zip(tokens, metadata["tokenizer.ggml.scores"], types, strict=True)
        if k == 1
    }
    symbols: list[tuple[str, bool]] = []
    at = 0
    while at < len(text):
        own = next((t for t in ("   ", "\n") if text.startswith(t, at)), None)
        symbols.append((own, True) if own else (text[at].replace(" ", "▁"), False))
        at += len(own or " ")
    while True:
        best = None
        for i in range(len(symbols) - 1):
            (left, l_own), (right, r_own) = symbols[i], symbols[i + 1]
            if not (l_own or r_own) and left + right in score:
                value = score[left + right]
                if best is None or value > best[0]:
                    best = (value, i)
        if best is None:
            break
        i = best[1]
        symbols[i : i + 2] = [(symbols[i][0] + symbols[i + 1][0], False)]
    out = []
    for symbol, own in symbols:
        known = own or symbol in score
        out += [symbol] if known else [f"<0x{b:02X}>" for b in symbol.encode()]
    return out


SPM = load(
    convert_tokenizer({**spm_metadata(SCORES), "tokenizer.ggml.add_bos_token": False}, "test")
)


@settings(max_examples=200)
@given(st.text(alphabet="abc \n\té", max_size=20))
def test_sentencepiece_merges_as_defined(text: str) -> None:
    encoded = SPM.encode(text)
    assert encoded.tokens == spm_reference(spm_metadata(SCORES), text)
    assert SPM.decode(encoded.ids) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_texts_come_back(text: str, prefix: bool) -> None:
    tokenizer = load(convert_tokenizer(spm_metadata(SCORES, prefix), "test"))
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 2 and 3 not in encoded.ids
    if not (prefix and ("\n" in text or "   " in text)):  # there, each part gets a prefix
        assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("b").tokens == ["<bos>", "▁b" if prefix else "b"]


def test_sentencepiece_configuration() -> None:
    metadata = {**spm_metadata(SCORES), "tokenizer.chat_template": "{{ x }}"}
    files = convert_tokenizer(metadata, "test")
    config = json.loads(files["tokenizer_config.json"])
    assert config["bos_token"] == "<bos>" and config["eos_token"] == "<eos>"
    assert config["add_bos_token"] is True and config["chat_template"] == "{{ x }}"
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [1]}
    tokenizer = load(files)
    for token, index in (("<pad>", 0), ("<bos>", 2), ("\n", 5), ("<0x00>", 6), ("▁b", 274)):
        assert tokenizer.token_to_id(token) == index
    assert tokenizer.encode("a<eos>a").ids.count(1) == 1
    assert tokenizer.encode("a", "b").ids.count(2) == 2


def test_templates_by_name_are_kept() -> None:
    named = {
        "tokenizer.chat_template.tool_use": "{{ y }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    metadata = {**spm_metadata(SCORES), "tokenizer.chat_template": "{{ x }}", **named}
    config = json.loads(convert_tokenizer(metadata, "x")["tokenizer_config.json"])
    templates = {entry["name"]: entry["template"] for entry in config["chat_template"]}
    assert templates == {"default": "{{ x }}", "tool_use": "{{ y }}"}


def byte_level_oracle() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, the cats sat there 12 123"] * 4, trainer
    )
    return tokenizer


def byte_level_metadata(oracle: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(oracle.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def test_byte_level_ids_are_the_originals() -> None:
    oracle = byte_level_oracle()
    tokenizer = load(convert_tokenizer(byte_level_metadata(oracle, "gpt-2"), "test"))
    for text in ["the cat sat there", *TEXTS]:
        assert tokenizer.encode(text).ids == oracle.encode(text).ids
    assert tokenizer.encode("a<|endoftext|>").ids[-1] == 0


@pytest.mark.parametrize(
    ("pre", "like"),
    [
        ("deepseek-r1-qwen", "qwen2"), ("megrez", "qwen2"), ("llama3", "llama-bpe"),
        ("falcon3", "llama-bpe"), ("dbrx", "smaug-bpe"), ("starcoder", "smollm"), ("olmo", "gpt-2"),
    ],
)  # fmt: skip
def test_another_name_of_a_split_is_read_as_that(pre: str, like: str) -> None:
    oracle = byte_level_oracle()
    found, expected = (
        convert_tokenizer(byte_level_metadata(oracle, name), "test") for name in (pre, like)
    )
    assert found == expected


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "smollm", "default"])
def test_byte_level_texts_come_back(pre: str) -> None:
    files = convert_tokenizer(byte_level_metadata(byte_level_oracle(), pre), "test")
    tokenizer = load(files)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert (tokenizer.encode("a").ids[0] == 0) is (pre == "llama-bpe")
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is (pre == "llama-bpe")
    words = [len(piece) for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("12345")]
    assert words == {"qwen2": [1] * 5, "llama-bpe": [3, 2], "smollm": [1] * 5}.get(pre, [5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "model = 'bert' is not supported"),
        ({"tokenizer.ggml.scores": None}, "score for each"),
        ({"tokenizer.ggml.token_type": [1]}, "there are 275 and 1$"),
        ({"tokenizer.ggml.tokens": []}, "there are 0 and 275$"),
        (
            {"tokenizer.ggml.bos_token_id": 10**6},
            "bos_token_id is 1000000, but there are only 275",
        ),
        ({"tokenizer.ggml.bos_token_id": "two"}, "cannot be converted"),
        ({"tokenizer.ggml.tokens": [1] * 275}, "cannot be converted"),
        ({"tokenizer.ggml.model": "gpt2"}, "needs tokenizer.ggml.merges"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"},
            "pre = 'odd' splits text in a",
        ),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["x y"]}, "'x y' has parts"),
    ],
)
def test_bad_vocabularies_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        convert_tokenizer({**spm_metadata(SCORES), **change}, "test")


def test_no_vocabulary_no_files() -> None:
    assert convert_tokenizer({}, "test") == {}


@pytest.mark.real
def test_real_gemma_weights(real_gguf: Path) -> None:
    read = open_checkpoint(str(real_gguf))
    assert read.config["sliding_window_pattern"] == 6
    assert read.config["tie_word_embeddings"] is True
    assert sum(prod(read.shape(name)) for name in read.names()) == 268_098_176
    rows = read.rows("model.embed_tokens.weight", 1000, 1010)
    assert rows.shape == (10, 640) and 0.01 < rows.std() < 0.1


@pytest.fixture(scope="module")
def real_tokenizer(real_gguf: Path) -> Tokenizer:
    return load(open_checkpoint(str(real_gguf)).tokenizer_files())


@pytest.mark.real
def test_real_gemma_tokenizer(real_tokenizer: Tokenizer) -> None:
    tokenizer = real_tokenizer
    assert tokenizer.encode("Hello world").ids == [2, 9259, 1902]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a      b").tokens == ["<bos>", "a", "      ", "b"]
    chat = tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>\n")
    assert chat.ids == [2, 105, 2364, 107, 2202, 106, 107]


@pytest.mark.real
def test_real_gemma_on_wikitext(real_tokenizer: Tokenizer) -> None:
    source = next((path for path in WIKITEXT if path.exists()), None)
    if source is None:
        pytest.skip("WikiText-2 is not here")
    tokenizer = real_tokenizer
    raw = source.read_text(encoding="utf-8")[:300_000]
    assert tokenizer.encode(raw).ids.count(3) == raw.count("<unk>")  # only where it is spelled
    text = raw.replace("<unk>", "unk")
    encoded = tokenizer.encode(text)
    assert 3 not in encoded.ids and tokenizer.decode(encoded.ids) == text
