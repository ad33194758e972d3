"""SST-2: reading, drawing, and the accuracy of label words against the dense model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.models import FAMILIES, model_of

from harness.oracles import reference
from harness.tasks import label_accuracy, sst2
from ondevice.bundle.store import Bundle
from ondevice.errors import DataError
from runtime.data.chat import ChatTemplate
from runtime.data.examples import row_of
from runtime.data.fields import Completion
from runtime.data.text_encoder import TextEncoder
from runtime.methods.adapters import Adapters

Tiny = Callable[..., Bundle]


def write_tsv(file: Path, count: int, first: int = 0) -> Path:
    lines = [f"it 's film {n}\u2028, really\t{n % 2}" for n in range(first, first + count)]
    file.write_text("\n".join([*lines, *lines[:3]]) + "\n")  # some are in it twice
    return file


def test_rows_are_disjoint_and_drawn_from_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, dev = write_tsv(tmp_path / "t.tsv", 40), write_tsv(tmp_path / "d.tsv", 20, 30)
    drawn = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        options = ["--train-rows=25", "--dev-rows=15", f"--seed={seed}"]
        out = tmp_path / name
        assert sst2.main([str(train), str(dev), "-o", str(out), *options]) == 0
        drawn[name] = [(out / f"{split}.jsonl").read_bytes() for split in ("train", "valid")]
    assert drawn["a"] == drawn["b"] != drawn["c"]
    rows, held_out = (sst2.read_jsonl(tmp_path / "a" / f"{s}.jsonl") for s in ("train", "valid"))
    assert len({row.prompt for row in rows + held_out}) == 25 + 15
    for row in rows:
        number = int(row.prompt.split()[3].removesuffix("\u2028"))
        assert row.prompt.endswith(", really It was")
        assert row.completion == (" great" if number % 2 else " terrible")
    assert "25 rows" in capsys.readouterr().out
    assert sst2.main([str(train), str(dev), "-o", str(tmp_path / "d"), "--dev-rows=21"]) == 4
    assert "there are 20 different sentences, not 21" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["no label", "words\t2", "\t1", "words 1", ""])
def test_other_files_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.tsv"
    file.write_text(f"sentence\tlabel\nfine\t1\n{line}\nfine\t0\n")
    with pytest.raises(DataError, match="line 3"):
        sst2.read_tsv(file)
    for text in ('{"prompt": "a", "completion": " good"}', '{"text": "a"}', "[1]", "x"):
        file.write_text(text)
        with pytest.raises(DataError):
            sst2.read_jsonl(file)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_the_words_are_the_dense_models(
    tiny: Tiny, rng: np.random.Generator, family: str
) -> None:
    bundle = tiny(family)
    adapters = Adapters.initial(bundle.manifest, 3)
    for name, value in adapters.tensors.items():
        if name.endswith("lora_b"):
            adapters.tensors[name] = mx.array(rng.normal(0, 0.05, value.shape).astype(np.float32))
    vocabulary = bundle.manifest.vocab_size
    prompts = [rng.integers(0, vocabulary, int(n)) for n in (1, 7, 16, 30)]
    labels = rng.choice(vocabulary, 2, replace=False)
    found = label_accuracy.word_logits(model_of(bundle, 32), adapters, prompts, labels)
    model = reference.dense_model(bundle, adapters)
    expected = [np.array(model(mx.array(tokens)[None])[0, -1])[labels] for tokens in prompts]
    assert found.shape == (4, 2)
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-4, atol=1e-5)


def test_accuracy_is_the_share_of_rows_whose_word_wins(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny("gemma3")
    ids = {" great": 5, " terrible": 9}

    def encode(text: str) -> list[int]:
        for word, number in ids.items():
            if text.endswith(word):
                return [*encode(text.removesuffix(word)), number]
        return [10 + ord(letter) % 90 for letter in text]

    def encode_places(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        letters = len(text) - sum(len(word) for word in ids if text.endswith(word))
        places = [(at, at + 1) for at in range(letters)]
        return encode(text), places + [(letters, len(text))] * (letters < len(text))

    none, chat = frozenset[int](), partial(ChatTemplate, tmp_path)
    encoder = TextEncoder(
        encode,
        encode_places,
        str,
        str,
        bos=2,
        eos=1,
        ends=none,
        special=none,
        chat=chat,
        has_template=False,
    )
    monkeypatch.setattr(label_accuracy, "load_encoder", lambda folder: encoder)
    rows = [
        sst2.Example("".join(map(chr, rng.integers(97, 122, int(n)))), (" great", " terrible")[i])
        for n, i in zip(rng.integers(1, 60, 19), rng.integers(0, 2, 19), strict=True)
    ]
    result = label_accuracy.label_accuracy(str(bundle.path), None, rows, tuple(ids))
    model = reference.dense_model(bundle)
    right = 0
    for row in rows:
        trained = row_of(Completion(row.prompt, row.completion), encoder, "assistant")
        first = trained.scored.index(1)  # the word is the first token that training scores
        assert trained.tokens[first] == ids[row.completion]
        logits = model(mx.array(trained.tokens[:first])[None])[0, -1]
        great, terrible = (float(logits[number]) for number in ids.values())
        right += (great >= terrible) == (row.completion == " great")
    assert result["label_accuracy"] == pytest.approx(right / 19)
    assert result["rows"] == 19 and sum(result["labels"].values()) == pytest.approx(1)
    with pytest.raises(DataError, match="has 3 tokens"):
        label_accuracy.word_tokens(encoder, (" great", "bad"))
    with pytest.raises(DataError, match="65 tokens"):
        label_accuracy.prompt_tokens(encoder, "x" * 64, bundle)
