"""What was removed: runs of earlier versions go on without it, or are refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import removed
from runtime.config.base import load, to_toml
from runtime.config.removed import load_run
from runtime.config.train import TrainConfig
from runtime.core.errors import UsageError

CONFIG = TrainConfig(bundle="b", data="d", steps=7)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The config.toml of a run that an earlier version began."""
    path = tmp_path / "config.toml"
    path.write_text(to_toml(CONFIG) + "heap_relief = true\n")
    return path


def test_an_option_without_effect_is_left_out_and_said(file: Path) -> None:
    notes: list[str] = []
    assert load_run(file, {"steps": "9"}, notes.append).steps == 9
    assert load_run(file, {}) == CONFIG
    (note,) = notes
    assert note.startswith(f"{file}: heap_relief was removed and is left out: no heap memory is")


def test_what_a_user_writes_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="unknown key 'heap_relief'"):
        load(TrainConfig, file, {})
    file.write_text(file.read_text() + "heap_releif = true\n")
    with pytest.raises(UsageError, match="unknown key 'heap_releif'"):
        load_run(file, {})


def test_a_run_of_a_method_that_was_removed_cannot_go_on(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removed, "REMOVED_METHODS", (CONFIG.method,))
    with pytest.raises(UsageError, match=f"the method {CONFIG.method} was removed; go on with"):
        load_run(file, {})
