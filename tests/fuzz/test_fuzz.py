"""A few cases of every kind; `python -m tests.fuzz` runs as many as one wants."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.forks import ROOT, import_path
from support.runs import python

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a forked child cannot use Metal")

QUICK = "data,settings,templates,tokenizers"
# what takes long to prepare; in the gate the tests of each reader, and of kills, change such files
OTHERS = (
    "adapters,resealed,saves,tokens",
    "bundle,graphs,manifest",
    "gguf,safetensors",
    "kill-export,kill-full,kill-mebp,kill-mezo,kill-tracing",
)
FUZZ = """
import os, sys

sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
from fuzz.command import main

sys.exit(main())
"""  # as `python -m tests.fuzz`
KNOWN = 1  # of what has broken a reader, in each run others


def fuzzed(tmp_path: Path, seed: int, kinds: str, count: int, *more: object) -> None:
    counts = tmp_path / "counts.json"
    words = ["--kind", kinds, "--count", count, "--seed", seed, "--first", 0, *more]
    words += ["--counts", counts, "--finds", tmp_path / "finds"]
    done = python(FUZZ, import_path(ROOT), *words, exporting=True)
    assert done.returncode == 0, done.stdout + done.stderr + counts.read_text()
    verdicts = json.loads(counts.read_bytes())["verdicts"]
    assert set(verdicts) == set(kinds.split(","))
    assert all(sum(counted.values()) >= count for counted in verdicts.values())


@pytest.mark.parametrize(
    "kinds", [QUICK, *(pytest.param(kinds, marks=pytest.mark.nightly) for kinds in OTHERS)]
)
def test_what_is_changed_is_refused_or_read(tmp_path: Path, seed: int, kinds: str) -> None:
    fuzzed(tmp_path, seed, kinds, 1, "--known", KNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [QUICK, *OTHERS])
def test_what_has_broken_a_reader_breaks_none(tmp_path: Path, seed: int, kinds: str) -> None:
    fuzzed(tmp_path, seed, kinds, 10)
