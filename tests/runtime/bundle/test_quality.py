"""What a bundle says that its export has cost."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.bundles import copied, manifest_of, rewrite

from ondevice.cli.describe import describe_bundle
from runtime.bundle.manifest import HURT_NATS, Quality
from runtime.bundle.store import Bundle, open_bundle
from runtime.core.errors import BundleError

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


def test_a_loss_that_fell_is_no_excuse() -> None:
    softened = msgspec.structs.replace(QUALITY, loss=4.2)
    assert softened.is_hurt and "higher" not in softened.warning()


def test_a_good_base_gives_no_warning() -> None:
    good = msgspec.structs.replace(QUALITY, divergence=HURT_NATS - 1e-6)
    assert not good.is_hurt and good.warning() == ""


def test_inspect_shows_it(origin: Bundle, tmp_path: Path) -> None:
    folder = copied(origin, tmp_path / "bundle")
    assert "not measured" in describe_bundle(open_bundle(folder))
    document = manifest_of(folder)
    document["quality"] = msgspec.to_builtins(QUALITY)
    rewrite(folder, document)
    opened = open_bundle(folder)
    assert opened.manifest.quality == QUALITY
    text = describe_bundle(opened)
    assert QUALITY.describe() in text and QUALITY.warning() in text


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"rows": -1}, {"divergence": -3.0}])
def test_impossible_figures_are_refused(
    origin: Bundle, tmp_path: Path, wrong: dict[str, float]
) -> None:
    folder = copied(origin, tmp_path / "bundle")
    document = manifest_of(folder)
    document["quality"] = {**msgspec.to_builtins(QUALITY), **wrong}
    rewrite(folder, document)
    with pytest.raises(BundleError, match="quality"):
        open_bundle(folder)
