"""A folder's tokenizer: built where tokenizer.json is missing, and what is odd about it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import NO_OTHERS, here, succeeds
from support.text_bundle import text_checkpoint
from support.token_rows import VOCAB, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from export.sources.tokenizer import UNREADABLE, folder_tokenizer, tokenizer_warnings
from runtime.core.errors import BundleError, DataError
from runtime.data.text_encoder import load_encoder

LINES = ["the cat sat on the mat, the cats sat there 12 123", "Grüße, 你好 🙂\n\n x"] * 20
PLAIN = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = ["the cat  sat", "Grüße 🙂!", "then 4567 <|im_end|>x\n\n\ty"]


def written(folder: Path, **files: object) -> Path:
    """A folder with these files, whose names have __ for a dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def byte_level(folder: Path, model_type: str, **config: object) -> Path:
    """A folder with vocab.json and merges.txt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    written(folder, config__json={"model_type": model_type}, tokenizer_config__json=config)
    tokenizer.model.save(str(folder))
    return folder


def pieces(folder: Path, name: str = "tokenizer.model") -> Any:
    """A folder with a model of SentencePiece, which is returned."""
    import sentencepiece

    folder.mkdir(exist_ok=True)
    (folder / "text").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "it"), vocab_size=340,
        model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "it.model").rename(folder / name)
    written(folder, config__json={"model_type": "llama"})
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / name))


def load(files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(files["tokenizer.json"].decode())


def test_vocab_and_merges_become_a_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    end = {"290": {"content": "<|im_end|>", "special": True}}
    folder = byte_level(
        tmp_path, "qwen2", tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>",
        added_tokens_decoder=end,
    )  # fmt: skip
    theirs, ours = AutoTokenizer.from_pretrained(folder), load(folder_tokenizer(folder))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text)
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_pieces_become_a_tokenizer(tmp_path: Path) -> None:
    theirs = pieces(tmp_path)
    files = folder_tokenizer(tmp_path)
    ours = load(files)
    for text in ("the cat  sat", "Grüße 🙂!", "then 4567 x"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text)
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


def test_what_transformers_cannot_build_is_refused_with_the_way_out(tmp_path: Path) -> None:
    written(tmp_path / "broken", tokenizer__model="x", config__json={"model_type": "llama"})
    byte_level(tmp_path / "other", "llama")  # whose class reads no vocab.json
    pieces(tmp_path / "pieces", "spiece.model")  # nor this
    byte_level(tmp_path / "panic", "qwen2")  # whose merges are not of the vocabulary
    written(tmp_path / "panic", vocab__json={"a": 0, "b": 1}, merges__txt="#version: 0.2\na b\n")
    named = {"broken": "tokenizer.model", "other": "vocab.json", "pieces": "spiece.model"}
    named["panic"] = "vocab.json"
    for folder, names in ((tmp_path / name, file) for name, file in named.items()):
        with pytest.raises(BundleError, match=f"has {names} and no tokenizer.json, and trans") as e:
            folder_tokenizer(folder)
        assert "save_pretrained, or copy the tokenizer.json" in str(e.value)


def test_the_end_that_only_a_class_names_is_found(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder = written(tmp_path, config__json={"model_type": "qwen3"})
    tokenizer.save(str(folder / "tokenizer.json"))
    found = json.loads(folder_tokenizer(folder)["tokenizer_config.json"])
    assert found["eos_token"] == "<|endoftext|>"
    make_tokenizer().save(str(folder / "tokenizer.json"))  # which has no such token
    files = folder_tokenizer(folder, [7, 8])
    assert "tokenizer_config.json" not in files
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [7, 8]
    written(folder, generation_config__json={"eos_token_id": 9})
    assert json.loads(folder_tokenizer(folder, 7)["generation_config.json"])["eos_token_id"] == 9


NAMED = {"eos_token": "<eos>"}


@pytest.mark.parametrize(
    ("config", "embedded", "said"),
    [
        (NAMED, VOCAB, []),
        (
            {**NAMED, "pad_token": "[PAD]"}, VOCAB,
            ["embeds 101 tokens, and the tokenizer has 1 more: '[PAD]' (101); rows of data"],
        ),
        (NAMED, VOCAB - 5, ["has 5 more", "'th' (98), ...", "embeddings(101))"]),
        (
            {**NAMED, "added_tokens_decoder": {"300": {"content": "<x>"}}}, 400,
            ["other numbers than they get, as in transformers: '<x>' is 101, and not 300"],
        ),
        ({}, VOCAB, ["names no eos_token"]),
        ({"added_tokens_decoder": 3}, VOCAB, ["cannot be read, nor any text"]),
        ({**NAMED, "chat_template": "{% generation %}{% break %}{% endgeneration %}"}, VOCAB, []),
        (
            {**NAMED, "chat_template": "a\n{% if a %}\n{{ b"}, VOCAB,
            ["line 3 of the chat template 'default' cannot be read", "statement'; correct it"],
        ),
        (
            {**NAMED, "chat_template": [{"name": "tool_use", "template": "{% endif %}"}]}, VOCAB,
            ["line 1 of the chat template 'tool_use'", "unknown tag 'endif'"],
        ),
        ({**NAMED, "chat_template": {"default": 3}}, VOCAB, ["the chat template cannot be read"]),
    ],
)  # fmt: skip
def test_what_is_odd_is_a_warning(
    config: dict[str, object], embedded: int, said: list[str]
) -> None:
    vocabulary = make_tokenizer().to_str().encode()
    files = {"tokenizer.json": vocabulary, "tokenizer_config.json": json.dumps(config).encode()}
    warnings = tokenizer_warnings(files, embedded)
    assert len(warnings) == bool(said)
    assert all(part in warnings[0] for part in said), warnings
    assert not tokenizer_warnings({}, embedded)


@pytest.mark.parametrize(
    ("change", "said", "is_read"),
    [
        ({"dropout": 0.5}, "dropout = 0.5 in tokenizer.json draws other tokens each time", False),
        ({"vocab": {"a": 0, "b": 1, "c": 1}}, "'b' and 'c' in tokenizer.json have one num", True),
    ],
)
def test_a_vocabulary_whose_tokens_are_left_to_chance_is_a_warning(
    change: dict[str, object], said: str, is_read: bool, tmp_path: Path
) -> None:
    whole = json.loads(Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str())
    whole["model"] |= change
    files = {"tokenizer.json": json.dumps(whole), "tokenizer_config.json": '{"eos_token": "a"}'}
    (warning,) = tokenizer_warnings({name: text.encode() for name, text in files.items()}, VOCAB)
    assert said in warning
    assert warning.startswith(UNREADABLE) != is_read
    (tmp_path / "tokenizer").mkdir()
    for name, text in files.items():
        (tmp_path / "tokenizer" / name).write_text(text)
    if is_read:  # as in an export, also where texts are read
        assert load_encoder(tmp_path).encode("bca") == [1, 1, 0]
        return
    with pytest.raises(DataError, match="cannot be read"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("settings", "generation", "said"),
    [
        ({"eos_token_id": VOCAB - 1, "bos_token_id": 0, "pad_token_id": -1}, {}, []),
        ({"eos_token_id": None, "pad_token_id": VOCAB}, {}, [f"pad_token_id is {VOCAB}, "]),
        ({"bos_token_id": 2**40}, {}, [f"bos_token_id is {2**40}, and the model embeds {VOCAB}"]),
        ({}, {"eos_token_id": [1, 999, -7]}, ["eos_token_id is 999, -7, "]),
        ({"eos_token_id": 999}, {"eos_token_id": 1}, []),  # generation_config.json wins
    ],
)
def test_numbers_of_tokens_that_the_model_does_not_embed_are_named(
    settings: dict[str, object], generation: dict[str, object], said: list[str]
) -> None:
    files = {
        "tokenizer.json": make_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(NAMED).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }
    warnings = tokenizer_warnings(files, VOCAB, settings)
    assert len(warnings) == len(said)
    assert all(part in warning for part, warning in zip(said, warnings, strict=True)), warnings


def test_an_end_that_is_no_number_is_named() -> None:
    files = {"tokenizer.json": make_tokenizer().to_str().encode()}
    files["generation_config.json"] = b'{"eos_token_id": "2"}'
    (warning,) = tokenizer_warnings(files, VOCAB)
    assert warning.endswith("'2' is no number of a token")


def test_tokens_that_the_model_does_not_embed_cost_their_rows(tmp_path: Path) -> None:
    """By every command that meets them: the tokenizer has two tokens more than the embedding."""
    source = text_checkpoint(tmp_path / "model", PLAIN)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"extra_special_tokens": ["<new>", "<other>"]}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    bundle = tmp_path / "bundle"
    done = succeeds("export", source, "-o", bundle, "--seq-lens", "16", "--no-quality", by=here)
    said = (
        "warning: the model embeds 101 tokens, and the tokenizer has 2 more: '<new>' (101), '<oth"
    )
    assert said in done.stderr and "(resize_token_embeddings(103))" in done.stderr
    data = tmp_path / "a.jsonl"
    rows = [{"prompt": "a", "completion": c} for c in ("b", "<new>", "c<new><other>", "d")]
    data.write_text("\n".join(map(json.dumps, rows)))
    options = ["--steps=1", NO_OTHERS, "--max-seq-length=16"]
    options += [f"--output={tmp_path / 'run'}", f"--data={data}"]
    for done in (here("data", data, f"--bundle={bundle}"), here("train", bundle, *options)):
        assert done.returncode == 0, done.stderr
        whole = done.stdout + done.stderr
        assert said in whole
        assert "4 rows read" in whole and "2 kept, 2 dropped (the model does not embed" in whole
        assert "warning: 2 rows with the token '<new>' (number 101), and the model emb" in whole
    done = here("generate", bundle, "--prompt", "<other>", "--max-tokens", 1)
    assert done.returncode == 2 and "has token 102, and the model embeds 101" in done.stderr
    assert "warning: the model embeds 101" in here("inspect", bundle).stdout
