"""The task of two turns: its conversations, its cities, and how its answers are counted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.generation import pieces
from support.text_bundle import text_bundle

from harness.tasks.two_turns import (
    ANSWERS,
    CITIES,
    TEMPLATE,
    UNSEEN,
    conversation,
    said,
    shares,
    split,
    with_template,
)
from runtime.data.chat import has_template
from runtime.data.text_encoder import load_encoder
from runtime.run.generate import Generator
from runtime.run.open import open_checked


def test_unseen_cities_are_not_trained(seed: int) -> None:
    trained, unseen = split(seed)
    assert len(unseen) == UNSEEN and sorted(trained + unseen) == sorted(set(CITIES))
    assert split(seed) == (trained, unseen) != split(seed + 1)


def test_a_conversation_has_two_questions_with_their_answers() -> None:
    assert [(one["role"], one["content"]) for one in conversation("Oslo")] == [
        ("user", "How is the weather in Oslo?"),
        ("assistant", "Sunny in Oslo"),
        ("user", "And tomorrow?"),
        ("assistant", "Rain in Oslo"),
    ]


def test_shares() -> None:
    answers = {
        "Oslo": ["Sunny in Oslo", "Rain in Oslo"],
        "Rome": ["Rain in Rome today", "Rain in Rome"],
        "Lima": ["Sunny in Rome", "Rain in Lima?"],
        "Cairo": ["Sunny in Cairo", ""],
    }
    assert shares(answers) == {
        "first": 0.5, "second": 0.5, "both": 0.25, "first_gets_second": 0.25,
    }  # fmt: skip


def test_each_turn_is_asked_after_the_right_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = text_bundle(tmp_path / "made", "{{ messages[-1].content[:9] }}")
    assert with_template(bundle.path, tmp_path) == bundle.path
    generator = Generator(open_checked(str(bundle.path)), load_encoder(bundle.path))
    found = said(generator, generator.adapters(None), "Oslo")
    assert len(found) == len(ANSWERS)
    for question, text in zip(("How is th", "And tomor"), found, strict=True):
        whole = pieces(bundle, question, None, 12, chat=True)
        assert text == "".join(whole).strip()


def test_a_bundle_without_a_template_is_copied_with_one(tmp_path: Path) -> None:
    bundle = text_bundle(tmp_path / "made", "x").path
    bare = Path(shutil.copytree(bundle, tmp_path / "bare"))
    (bare / "tokenizer" / "tokenizer_config.json").write_text("{}")
    copy = with_template(bare, tmp_path)
    assert not has_template(bare / "tokenizer")
    assert (copy / "tokenizer" / "chat_template.jinja").read_text() == TEMPLATE
