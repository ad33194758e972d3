"""Every model type of the installed mlx-lm: its state is as it is recorded, and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.peers import run_script

from export.sources.verified import CLOSE, is_verified, tried_types
from model_types.command import NO_CLASS, NOT_COMPARED, PAGE, apart, page
from model_types.drawn import Rng, drawn
from model_types.tiny import is_model, model_types, tiny
from model_types.trial import difference, made_elsewhere, missing, refusal

CLOSE_DRAWN = 1e-4  # some factors enlarge roundings
COMPARED = sorted(name for name, state in tried_types().items() if isinstance(state, float))


def test_the_page_is_made_of_what_was_recorded() -> None:
    assert PAGE.read_text() == page(dict(tried_types()))
    assert sum(map(is_verified, tried_types())) >= 45


@pytest.mark.slow
def test_every_type_is_recorded_as_it_is() -> None:
    found = {}
    for model_type in filter(is_model, model_types()):
        why = refusal(model_type)
        found[model_type] = None if why is None else missing(model_type, why)
    assert found.keys() == tried_types().keys()
    for model_type, state in tried_types().items():
        cut = isinstance(state, float) or state.startswith((NO_CLASS, NOT_COMPARED))
        assert found[model_type] == (None if cut else state), model_type


@pytest.mark.slow
def test_types_that_work_are_as_in_transformers(tmp_path: Path, seed: int) -> None:
    made_elsewhere(tmp_path, COMPARED, seed % 1000)
    found = {name: apart(tmp_path, name) for name in COMPARED}
    wrong = {
        name: state
        for name, state in found.items()
        if is_verified(name) and not (isinstance(state, float) and state <= CLOSE)
    }
    assert not wrong


@pytest.mark.slow
def test_random_settings_are_computed_as_in_transformers_or_refused(
    tmp_path: Path, rng: Rng
) -> None:
    for name in filter(is_verified, COMPARED):
        change = drawn(rng, name)
        try:
            raw = {**tiny(name, **change), "dtype": change.get("dtype", "float32")}
        except (AttributeError, TypeError, ValueError) as problem:  # of transformers
            print(name, change, problem)
            continue
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
    run_script(("torch", "transformers"), "transformers_random.py", tmp_path, 7)
    found = {folder.name: difference(folder) for folder in sorted(tmp_path.iterdir())}
    print(json.dumps(found, indent=1))
    computed = {name: state for name, state in found.items() if isinstance(state, float)}
    assert len(computed) > len(found) // 4
    assert not {name: apart for name, apart in computed.items() if not apart <= CLOSE_DRAWN}
