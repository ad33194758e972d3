"""Damaged bundles are refused; what an export has cost is read from those that are whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.bundles import Rng, copied, rewrite, say

from ondevice.cli.describe import describe_bundle
from runtime.bundle.manifest import HURT_NATS, VERSION, Quality
from runtime.bundle.store import MANIFEST, WEIGHTS, Bundle, open_bundle
from runtime.core.errors import BundleError
from runtime.storage.weights import Weights


def parts(bundle: Bundle) -> list[str]:
    manifest = bundle.manifest
    graph = next(iter(manifest.graphs.values())).file
    return [WEIGHTS, graph, next(iter(manifest.files)), MANIFEST]


@pytest.mark.parametrize("part", range(4))
def test_truncation_is_seen_at_once(origin: Bundle, tmp_path: Path, rng: Rng, part: int) -> None:
    name = parts(origin)[part]
    whole = (origin.path / name).read_bytes()
    path = copied(origin, tmp_path / "bundle")
    for length in (0, len(whole) - 1, int(rng.integers(1, len(whole)))):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(BundleError, match=MANIFEST if part == 3 else "truncated"):
            open_bundle(path)
    (path / name).unlink()
    with pytest.raises(BundleError, match=Path(name).name):
        open_bundle(path)


@pytest.mark.parametrize("part", range(3))
def test_a_flipped_bit_is_seen_by_verify(
    origin: Bundle, tmp_path: Path, rng: Rng, part: int
) -> None:
    path = copied(origin, tmp_path / "bundle")
    file = path / parts(origin)[part]
    blob = bytearray(file.read_bytes())
    at = int(rng.integers(len(blob)))
    blob[at] ^= 1 << int(rng.integers(8))
    file.write_bytes(blob)
    bundle = open_bundle(path)  # sizes are right
    with pytest.raises(BundleError, match=file.name):
        bundle.verify()
    if part:
        with pytest.raises(BundleError, match=file.name):
            bundle.verify_small()
    else:
        bundle.verify_small()


def test_weights_that_shrink_after_opening_are_refused(origin: Bundle, tmp_path: Path) -> None:
    bundle = open_bundle(copied(origin, tmp_path / "bundle"))
    for left in (bundle.manifest.weights_nbytes - 16384, 0):
        os.truncate(bundle.weights_path, left)
        with pytest.raises(BundleError, match="changed its size"):
            Weights(bundle)


@pytest.mark.parametrize("name", [WEIGHTS, "graphs", "tokenizer", MANIFEST])
def test_links_out_of_the_bundle_are_refused(origin: Bundle, tmp_path: Path, name: str) -> None:
    path = copied(origin, tmp_path / "bundle")
    outside = tmp_path / "outside"
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    with pytest.raises(BundleError, match="leads out of the bundle"):
        open_bundle(path)
    (path / name).unlink()
    (path / name).symlink_to(path / name)  # a loop
    with pytest.raises(BundleError):
        open_bundle(path)


def test_what_is_no_bundle_is_refused(tmp_path: Path, origin: Bundle) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / MANIFEST).mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / MANIFEST)
    for path in ("nowhere", "file", "folder", "pipe", ".", "x" * 300, "file/below"):
        with pytest.raises(BundleError):
            open_bundle(tmp_path / path)
    inner = copied(origin, tmp_path / "inner")
    (inner / WEIGHTS).unlink()
    (inner / WEIGHTS).mkdir()
    with pytest.raises(BundleError, match=WEIGHTS):
        open_bundle(inner)


TEXTS = [
    b"",
    b"\0",
    b"null",
    b"[]",
    b'"ondevice-bundle"',
    b"{}",
    b'{"format": "ondevice-bundle"}',
    f'{{"format": ["ondevice-bundle"], "version": {VERSION}}}'.encode(),
    f'{{"format": "ondevice-bundle", "version": {VERSION - 1}}}'.encode(),
    b'{"format": "ondevice-bundle", "version": true}',
    f'{{"format": "ondevice-bundle", "version": "{VERSION}"}}'.encode(),
    f'{{"format": "ondevice-bundle", "version": {VERSION}}}'.encode(),
    b"\xff\xfe\x00\x01",
    b'{"format": "\xff"}',
    b"{" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 100_000,
    b'{"format": "ondevice-bundle", "version": ' + b"1" * 5000 + b"}",
    b'{"format": "ondevice-bundle", "version": 1' + b"0" * 4000 + b"}",
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:50].decode("latin-1"))
def test_documents_that_are_no_manifest(origin: Bundle, tmp_path: Path, text: bytes) -> None:
    path = copied(origin, tmp_path / "bundle")
    rewrite(path, text)
    with pytest.raises(BundleError):
        open_bundle(path)


def test_nesting_of_any_depth_is_refused(origin: Bundle, tmp_path: Path) -> None:
    path = copied(origin, tmp_path / "bundle")
    whole = (path / MANIFEST).read_bytes()
    limit = sys.getrecursionlimit()
    for depth in (*range(25, limit, 100), *range(limit - 120, limit + 5)):
        nested = b'"hidden_size": ' + b"[" * depth + b"]" * depth
        for place in (b"\n ", b"\n  "):  # the manifest's own, and its configuration's
            assert whole.count(place + b'"hidden_size": 128') == 1
            rewrite(path, whole.replace(place + b'"hidden_size": 128', place + nested))
            with pytest.raises(BundleError):
                open_bundle(path)


def deny(monkeypatch: pytest.MonkeyPatch, method: str, file: Path) -> None:
    """Let the system refuse a file; to the superuser it never does."""
    original = getattr(Path, method)

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == file:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, method, denied)


@pytest.mark.parametrize("part", range(4))
def test_what_cannot_be_read_is_refused_with_the_reason(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    path = copied(origin, tmp_path / "bundle")
    file = path / parts(origin)[part]
    bundle = open_bundle(path)
    uses: list[Callable[[], object]] = [bundle.verify]
    if part == 0:
        uses.append(lambda: Weights(bundle))
    if part == 3:
        uses = [lambda: open_bundle(path)]
    with monkeypatch.context() as patch:
        deny(patch, "open", file)
        for use in uses:
            with pytest.raises(BundleError, match=rf"{file} cannot be read: Permission denied"):
                use()
    with monkeypatch.context() as patch:
        deny(patch, "stat", file)
        with pytest.raises(BundleError, match=f"{file}"):
            open_bundle(path)
    if part < 3:
        file.unlink()
        file.mkdir()
        for use in uses:
            with pytest.raises(BundleError, match=f"{file} cannot be read: Is a directory"):
                use()


QUALITY = Quality(
    divergence=0.633, source_loss=4.293, loss=4.76, tokens=10240, rows=40, text="test.txt"
)


def test_a_sentence_and_a_warning_with_the_way_out() -> None:
    assert QUALITY.describe() == (
        "loss 4.760, the checkpoint's 4.293; KL divergence from it 0.633 nats per token, on 10240 "
        "tokens of test.txt"
    )
    assert "0.63 nats per token (KL divergence)" in QUALITY.warning()
    assert "0.47 nats higher" in QUALITY.warning() and "--calibrate" in QUALITY.warning()
    softened = msgspec.structs.replace(QUALITY, loss=4.2)  # which is no excuse
    assert softened.is_hurt and "higher" not in softened.warning()
    good = msgspec.structs.replace(QUALITY, divergence=HURT_NATS - 1e-6)
    assert not good.is_hurt and good.warning() == ""


def test_inspect_shows_it(origin: Bundle, tmp_path: Path) -> None:
    folder = copied(origin, tmp_path / "bundle")
    assert "not measured" in describe_bundle(open_bundle(folder))
    opened = open_bundle(say(folder, "quality", msgspec.to_builtins(QUALITY)))
    assert opened.manifest.quality == QUALITY
    text = describe_bundle(opened)
    assert QUALITY.describe() in text and QUALITY.warning() in text


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"rows": -1}, {"divergence": -3.0}])
def test_impossible_figures_are_refused(
    origin: Bundle, tmp_path: Path, wrong: dict[str, float]
) -> None:
    folder = copied(origin, tmp_path / "bundle")
    say(folder, "quality", {**msgspec.to_builtins(QUALITY), **wrong})
    with pytest.raises(BundleError, match="quality"):
        open_bundle(folder)
