"""Seeds of tests: fixed by their names, repeated on demand, and fresh at night."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
DRAWN = "test_a_seed_follows_from_the_name_unless_it_is_given"


def test_a_seed_follows_from_the_name_unless_it_is_given(
    request: pytest.FixtureRequest, seed: int, rng: np.random.Generator, draw: int
) -> None:
    name = request.node.nodeid
    if "ONDEVICE_TEST_SEED" in os.environ:
        assert seed == int(os.environ["ONDEVICE_TEST_SEED"])
    else:
        assert (seed == zlib.crc32(name.encode())) == (draw == 0)
    assert rng.integers(1 << 62) == np.random.default_rng(seed).integers(1 << 62)
    assert request.node.get_closest_marker("draws")


@given(st.integers(0, 1 << 62))
def test_hypothesis_is_selected_too(request: pytest.FixtureRequest, number: int) -> None:
    assert request.node.get_closest_marker("draws")


def test_what_draws_nothing_is_not_repeated(request: pytest.FixtureRequest) -> None:
    assert not request.node.get_closest_marker("draws")


def test_a_given_seed_is_taken(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONDEVICE_TEST_SEED", "17")
    assert request.getfixturevalue("seed") == 17


def test_every_test_that_draws_runs_with_as_many_fresh_seeds_as_are_asked_for() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-mdraws", "--fresh-seeds=3", "-rA"]
    environment = {key: value for key, value in os.environ.items() if key != "ONDEVICE_TEST_SEED"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    seeds = [line for line in lines if line.startswith("ONDEVICE_TEST_SEED=")]
    assert len(seeds) == len(set(seeds)) == 6
    for name in (DRAWN, "test_hypothesis_is_selected_too"):
        passed = [line for line in lines if line.startswith("PASSED") and f"::{name}[" in line]
        assert [line[-7:] for line in passed] == ["[draw1]", "[draw2]", "[draw3]"]
