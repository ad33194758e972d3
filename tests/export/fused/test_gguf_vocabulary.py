"""Vocabularies of fused GGUF files: read back by our reader, they split texts as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.models import Rng
from support.vocabularies import CONTROL, NORMAL, PIECES, UNUSED, USER, spm_metadata
from tokenizers import Tokenizer

from export.fused.gguf_vocabulary import add_vocabulary, read_vocabulary
from export.sources.gguf_file import GGUFFile
from export.sources.gguf_tokenizer import SPLITS, convert_tokenizer
from runtime.core.errors import UsageError

Files = dict[str, bytes]
TEMPLATE = "{{ messages }}"


def sentencepiece(rng: Rng, prefix: bool) -> dict[str, Any]:
    """Metadata of a file with pieces of random scores, no two alike."""
    metadata = spm_metadata(-rng.permutation(len(PIECES)), prefix)
    return {**metadata, "tokenizer.ggml.padding_token_id": 0, "tokenizer.chat_template": TEMPLATE}


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a file with a few merges."""
    # GPT-2's letters for bytes
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(68)]
    tokens = [*letters, "th", "the", "Ġthe", "<|end|>", "<think>"]
    types = [*([NORMAL] * (len(tokens) - 2)), CONTROL, USER]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }


def written(path: Path, files: Files, size: int, arch: str = "llama") -> dict[str, Any]:
    """The metadata of a GGUF file with this vocabulary."""
    writer = gguf.GGUFWriter(path, arch)
    add_vocabulary(writer, files, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return GGUFFile(path).metadata


def tokenizer(files: Files) -> Tokenizer:
    return Tokenizer.from_str(files["tokenizer.json"].decode())


@pytest.mark.parametrize(("prefix", "arch"), [(False, "llama"), (True, "llama"), (False, "gemma4")])
def test_sentencepiece_comes_back(tmp_path: Path, rng: Rng, prefix: bool, arch: str) -> None:
    first = {**sentencepiece(rng, prefix), "tokenizer.ggml.add_bos_token": True}
    files = convert_tokenizer(first, "the first")
    size = len(first["tokenizer.ggml.tokens"])
    again = written(tmp_path / "a.gguf", files, size + 3, arch)
    pads = [f"[PAD{size + n}]" for n in range(3)]
    assert again["tokenizer.ggml.tokens"] == [*first["tokenizer.ggml.tokens"], *pads]
    types = again["tokenizer.ggml.token_type"].tolist()
    assert types == [*first["tokenizer.ggml.token_type"].tolist(), *[UNUSED] * 3]
    numbers = [key for key in first if key.endswith("_id")]
    for key in (*numbers, *(f"tokenizer.ggml.add_{one}" for one in ("bos_token", "space_prefix"))):
        assert again[key] == first[key], key
    assert again["tokenizer.chat_template"] == TEMPLATE
    for _ in range(30):
        text = "".join(rng.choice([*"abc \n", "é"], 20))
        ids = tokenizer(files).encode(text).ids
        assert tokenizer(convert_tokenizer(again, "again")).encode(text).ids == ids
    assert again["tokenizer.ggml.model"] == arch
    assert ("tokenizer.ggml.scores" in again) == (arch == "llama")
    if arch == "gemma4":  # which has merges
        return
    joined = [n for n, piece in enumerate(first["tokenizer.ggml.tokens"]) if piece in ("ab", "ca")]
    before, after = (one["tokenizer.ggml.scores"][joined] for one in (first, again))
    assert (np.diff(before) > 0) == (np.diff(after) > 0), "what is joined first is another"


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_byte_level_vocabularies_come_back(tmp_path: Path, pre: str) -> None:
    first = byte_level(pre)
    files = convert_tokenizer(first, "the first")
    size = len(first["tokenizer.ggml.tokens"])
    again = written(tmp_path / "a.gguf", files, size)
    for key in ("tokens", "merges", "bos_token_id", "eos_token_id", "model"):
        assert again[f"tokenizer.ggml.{key}"] == first[f"tokenizer.ggml.{key}"], key
    kinds = again["tokenizer.ggml.token_type"].tolist()
    assert kinds == first["tokenizer.ggml.token_type"].tolist()
    assert SPLITS[again["tokenizer.ggml.pre"]] == SPLITS[pre]
    assert again["tokenizer.ggml.add_bos_token"] == (pre == "llama-bpe")
    text = "the then 12345 x\n\n <think>the<|end|>"
    ids = tokenizer(files).encode(text).ids
    assert tokenizer(convert_tokenizer(again, "again")).encode(text).ids == ids


def test_no_vocabulary_comes_back(tmp_path: Path) -> None:
    again = written(tmp_path / "a.gguf", {}, 320)
    assert again["tokenizer.ggml.model"] == "no_vocab"
    assert convert_tokenizer(again, "again") == {}


def test_a_template_in_a_file_of_its_own_wins(rng: Rng) -> None:
    files = convert_tokenizer(sentencepiece(rng, False), "the first")
    found = read_vocabulary({**files, "chat_template.jinja": b"{{ other }}"}, 300)
    assert found.chat_template == "{{ other }}"


def test_named_templates_further_tokens_and_ends_come_back(tmp_path: Path) -> None:
    files = convert_tokenizer(byte_level("qwen2"), "the first")
    config = json.loads(files["tokenizer_config.json"])
    size = len(byte_level("qwen2")["tokenizer.ggml.tokens"])
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    files |= {
        "tokenizer_config.json": json.dumps({**config, "chat_template": named}).encode(),
        "special_tokens_map.json": b'{"pad_token": "<pad>", "sep_token": "<think>"}',
        "added_tokens.json": json.dumps({"<|eom|>": size, "<|turn|>": size + 1}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [size - 2, size, size + 1]}).encode(),
    }
    metadata = written(tmp_path / "a.gguf", files, size + 3)
    kinds = [int(kind) for kind in metadata["tokenizer.ggml.token_type"][-4:]]
    assert metadata["tokenizer.ggml.tokens"][-4:] == ["<think>", "<|eom|>", "<|turn|>", "<pad>"]
    assert kinds == [USER, USER, USER, CONTROL]
    again = convert_tokenizer(metadata, "again")
    found = json.loads(again["tokenizer_config.json"])
    assert found["chat_template"] == named
    assert (found["pad_token"], found["sep_token"]) == ("<pad>", "<think>")
    ends = json.loads(again["generation_config.json"])["eos_token_id"]
    assert ends == [size - 2, size, size + 1]


def changed(files: Files, where: str, value: object) -> Files:
    document = json.loads(files["tokenizer.json"])
    *parents, last = where.split(".")
    inner = document
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return {**files, "tokenizer.json": json.dumps(document).encode()}


def test_what_gguf_files_cannot_hold_is_refused_by_name(rng: Rng) -> None:
    pieces = convert_tokenizer(sentencepiece(rng, False), "the first")
    octets = convert_tokenizer(byte_level("qwen2"), "the first")
    merges = json.loads(pieces["tokenizer.json"])["model"]["merges"]
    abc = [one for one in merges if "".join(one) == "abc"]
    others = [one for one in merges if one not in abc]
    split = {"type": "Split", "pattern": {"Regex": r"\d+"}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    own = {"type": "Sequence", "pretokenizers": [split, level]}
    cases = [
        ({"vocab.txt": b""}, "there is no tokenizer.json, but vocab.txt"),
        ({"tokenizer.json": b"[]"}, "another form"),
        (changed(pieces, "post_processor", {"type": "TemplateProcessing"}), "another form"),
        (changed(pieces, "normalizer", {"type": "Sequence", "normalizers": [3]}), "another form"),
        (changed(pieces, "model.type", "Unigram"), "Unigram"),
        (changed(pieces, "normalizer", {"type": "Lowercase"}), "Lowercase"),
        (changed(pieces, "pre_tokenizer", {"type": "Whitespace"}), "Whitespace"),
        (changed(pieces, "model.byte_fallback", False), "neither byte-level"),
        (changed(pieces, "model.merges", merges[:-1]), "ways, of which its merges have"),
        (changed(pieces, "model.merges", [abc[0], *others, abc[1]]), "do not follow each other"),
        (changed(octets, "pre_tokenizer", own), r"splits text by .*for which llama.cpp"),
        (changed(octets, "normalizer", {"type": "NFKC"}), "NFKC"),
        (changed(octets, "post_processor", {"type": "BertProcessing"}), "BertProcessing"),
    ]
    for files, said in cases:
        with pytest.raises(UsageError, match=said):
            read_vocabulary(files, 400)
    with pytest.raises(UsageError, match="is number 10, and the model has 10"):
        read_vocabulary(pieces, 10)
