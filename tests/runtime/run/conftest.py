"""A tiny bundle that the tests of runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.bundles import Tiny

import runtime.data.text_encoder
from runtime.data.prompts import Prompt, chat_prompt


@pytest.fixture(scope="session")
def bundle(tiny: Tiny) -> Path:
    return tiny("gemma3", seq_lens=(16, 32), device="auto").path


@pytest.fixture
def rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are rendered in this process, where a test can change what they say.

    It imports transformers once, and a process for each prompt would for each.
    """

    def prompt(folder: Path, messages: object, pieces: Path | None) -> Prompt:
        return chat_prompt(runtime.data.text_encoder.load_encoder(folder), messages)

    monkeypatch.setattr("runtime.run.generate.confined_prompt", prompt)
