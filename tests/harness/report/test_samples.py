"""Samples: what is asked of a run's rows, and what the base model and the adapters answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.bundles import runnable
from support.generation import pieces
from support.runs import here, ondevice, train_arguments
from support.shared import Shared
from support.text_bundle import text_bundle
from support.token_rows import EOS, VOCAB, Listed, ids, make_tokenizer, write_rows

from harness.report.samples import MOST_PROMPT, question, sample_tables
from runtime.bundle.store import Bundle
from runtime.data.rows import TokenRows
from runtime.data.text_encoder import load_encoder

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
SAID = [("red?", "the rose"), ("blue?", "the sky"), ("two?", "one the")]


@pytest.fixture(scope="module")
def bundle(shared: Shared) -> Bundle:
    made = shared("a bundle for samples", lambda path: text_bundle(path, TEMPLATE))
    return runnable(made / "bundle")


@pytest.fixture(scope="module")
def runs(bundle: Bundle, shared: Shared) -> Path:
    """Runs "a" and "b" of the same held-out rows, "text" of text, and "random" of random rows."""

    def train(folder: Path) -> None:
        data = folder / "data"
        data.mkdir(parents=True)
        lines = [
            json.dumps(
                {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
            )
            for q, a in SAID
        ]
        for split in ("train", "valid"):
            (data / f"{split}.jsonl").write_text("\n".join(lines))
        (folder / "rows.txt").write_text("the cat and the hat\n" * 9)
        sources = {"a": data, "b": data, "text": folder / "rows.txt", "random": "random:3"}
        for seed, (name, source) in enumerate(sources.items()):
            more = {"data": source, "seed": seed, "learning_rate": 0.1, "max_seq_length": 32}
            done = ondevice(*train_arguments(bundle.path, folder / name, 12, **more))
            assert done.returncode == 0, done.stderr

    return shared("runs for samples", train)


def written(text: str) -> str:
    """The text as the small tokenizer shows it again, with spaces between tokens."""
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode(text).ids
    return str(tokenizer.decode(tokens, skip_special_tokens=False)).strip()


def settings_of(bundle: Bundle) -> dict[str, object]:
    return {"bundle": str(bundle.path)}


@pytest.mark.usefixtures("rendered_here")
def test_the_tables_hold_what_generation_says(bundle: Bundle, runs: Path) -> None:
    given = [(name, runs / name, settings_of(bundle)) for name in ("a", "b", "text", "random")]
    (both, text), notes = sample_tables(given, 2)
    assert notes == ["random has no samples: its rows are not text."]
    assert both.title == "Samples from held-out rows" and text.title == "Samples from training rows"
    assert both.rows[0] == ("prompt", "in the data", "before training", "after: a", "after: b")
    assert len(both.rows) == 3 and len(text.rows) == 3
    shown = {written(f"u: {asked}<eos>\na: "): (asked, written(answer)) for asked, answer in SAID}
    for prompt, expected, *said in both.rows[1:]:
        message, answer = shown[prompt]
        assert expected == answer
        most = len(ids(dict(SAID)[message])) + 1 + 8  # its end, and what may be longer
        for one, adapter in zip(said, (None, runs / "a", runs / "b"), strict=True):
            whole = pieces(bundle, message, adapter, most, chat=True)
            assert one == "".join(whole).strip()
    assert len({text for line in both.rows[1:] for text in line[2:]}) > 2


def test_the_page_has_the_samples(bundle: Bundle, runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = here("report", runs / "a", "-o", page, "--samples", 3)
    assert done.returncode == 0, done.stderr
    for text in ("Samples from held-out rows", "after: a", written("the sky")):
        assert text in page.read_text()
    unsaved = Path(shutil.copytree(runs / "a", tmp_path / "unsaved"))
    (unsaved / "adapters.safetensors").unlink()
    ((table,), _) = sample_tables([("unsaved", unsaved, settings_of(bundle))], 1)
    assert table.rows[1][3] == "(nothing is saved yet)"


def test_a_bundle_that_is_gone_is_said(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "a", tmp_path / "run"))
    config = (run / "config.toml").read_text().splitlines()
    moved = [
        f'bundle = "{tmp_path}/gone"' if line.startswith("bundle ") else line for line in config
    ]
    (run / "config.toml").write_text("\n".join(moved))
    refused = here("report", run, "-o", tmp_path / "page.html", "--samples", 1)
    assert refused.returncode == 4 and "leave out --samples" in refused.stderr, refused.stderr
    assert f"{tmp_path}/gone" in refused.stderr and "Traceback" not in refused.stderr
    assert here("report", run, "-o", tmp_path / "page.html").returncode == 0


def asked(bundle: Bundle, folder: Path, row: Listed) -> tuple[list[int], list[int], frozenset[int]]:
    rows = TokenRows(write_rows(folder / "rows.tokens", [row], 99), VOCAB)
    found = question(rows, 0, load_encoder(bundle.path))
    return found.prompt.tokens, found.expected, found.prompt.ends


def test_a_question_ends_where_the_first_answer_begins(
    bundle: Bundle, tmp_path: Path, rng: np.random.Generator
) -> None:
    tokens = rng.integers(2, VOCAB, 20).tolist()
    start, stop = sorted(rng.choice(range(2, 18), 2, replace=False).tolist())
    scored = [*range(start - 1, stop - 1), 18]  # positions, which predict the next token
    assert asked(bundle, tmp_path, (tokens, scored)) == (
        tokens[:start], tokens[start:stop], frozenset({EOS}),
    )  # fmt: skip


def test_text_is_divided(bundle: Bundle, tmp_path: Path, rng: np.random.Generator) -> None:
    for count, start in ((2, 1), (9, 4), (99, MOST_PROMPT)):
        tokens = rng.integers(2, VOCAB, count).tolist()
        prompt, expected, _ = asked(bundle, tmp_path, (tokens, list(range(count - 1))))
        assert (prompt, expected) == (tokens[:start], tokens[start:])
