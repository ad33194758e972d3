"""How long rows are where nobody says it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.bundles import Tiny
from support.token_rows import ids, make_bundle

from runtime.bundle.store import Bundle
from runtime.data.source import Reading, TokenSource


@pytest.fixture
def bundle(tiny: Tiny, tmp_path: Path) -> Any:
    """As much of a bundle as reading takes, for 16, 32 and 300 tokens."""
    path = make_bundle(tmp_path / "bundle", {})
    manifest = msgspec.structs.replace(tiny("qwen2").manifest, buckets=(16, 32, 300))
    return SimpleNamespace(path=path, manifest=manifest)


@pytest.mark.parametrize(("longest", "length"), [(9, 16), (16, 16), (17, 32), (33, 300)])
def test_the_shortest_length_that_holds_every_row(
    bundle: Bundle, tmp_path: Path, longest: int, length: int
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"text": "a" * 5}, {"text": "a" * (longest + 1)}]
    data.write_text("\n".join(map(json.dumps, rows)))
    source = TokenSource("train.tokens", str(data), "train", Reading())
    assert source.bucket(bundle, tmp_path) == length
    made = (tmp_path / "train.tokens").stat()
    tokens, _ = source.rows(bundle, tmp_path, length).row(1)
    assert tokens.tolist() == ids("a" * (longest + 1))
    assert (tmp_path / "train.tokens").stat() == made  # it is read once


def test_rows_longer_than_the_bundle_get_its_longest(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a" * 999}))
    source = TokenSource("train.tokens", str(tmp_path / "rows.jsonl"), "train", Reading())
    assert source.bucket(bundle, tmp_path) == 300
    report = source.rows(bundle, tmp_path, 300).report
    assert report is not None and report.cut == 1


def test_text_and_random_rows_have_the_usual_length(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a" * 999)
    for data in (str(tmp_path / "rows.txt"), "random:3"):
        assert TokenSource("train.tokens", data, "train", Reading()).bucket(bundle, tmp_path) == 32
    assert bundle.manifest.usual_bucket == 32
    long = msgspec.structs.replace(bundle.manifest, buckets=(512, 1024))
    assert long.usual_bucket == 512
