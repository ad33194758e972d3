"""Calibrated exports: what they cost the model, and what they leave as it is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import settings
from support.checkpoints import weights_of, write_folder
from support.token_rows import write_tokenizer

from export.bundle import export_bundle
from export.config.export import ExportConfig
from export.passes.engine import Compared, ExportEngine
from runtime.bundle.store import Bundle
from runtime.core.errors import BudgetError, DataError, UsageError
from runtime.data.source import Reading, TokenSource
from runtime.machine.footprint import Meter

BUDGET = 1_000_000_000


def no_progress(what: str, done: int, total: int) -> None:
    pass


def said(text: str) -> None:
    pass


def exported(source: object, output: Path, budget: int = BUDGET, **more: Any) -> Bundle:
    engine = partial(ExportEngine, Meter(), budget, no_progress, said)
    return export_bundle(settings(source, output, seq_lens=(32,), **more), no_progress, engine)


@pytest.fixture
def text(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Text of few words, so that inputs are correlated."""
    words = ["ab", "cd", "abc", "d", "bb", "dcba", "a"]
    lines = (" ".join(rng.choice(words, 60)) for _ in range(60))
    file = tmp_path / "text.txt"
    file.write_text("\n".join(lines))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tiny-qwen2 with a tokenizer of letters."""
    config, arrays = weights_of("tiny-qwen2")
    made = write_folder(tmp_path / "checkpoint", config, arrays)
    write_tokenizer(made, {})
    return made


@pytest.mark.parametrize(
    "preset",
    [
        "tiny-qwen2",
        *(pytest.param(f"tiny-{f}", marks=pytest.mark.slow) for f in ("llama", "gemma3")),
    ],
)
def test_calibration_brings_predictions_nearer(tmp_path: Path, preset: str) -> None:
    """With tied embeddings and without, with biases and without."""
    data = {"calibrate": "random:3", "calibration_tokens": 1500}
    common = {"eight_bit": "none"}
    made = {
        "rounded": exported(f"random:{preset}", tmp_path / "rounded", **common),
        "calibrated": exported(f"random:{preset}", tmp_path / "calibrated", **common, **data),
    }
    assert made["rounded"].manifest.quality is None  # text says nothing of random weights
    found = {name: divergence(bundle, f"random:{preset}") for name, bundle in made.items()}
    assert found["calibrated"] < 0.95 * found["rounded"]  # a tiny Gemma 3 reaches 0.931
    facts = made["calibrated"].manifest.provenance["calibration"]
    assert facts["data"] == "random:3" and facts["damping"] == 0.1  # of few tokens
    assert 1500 <= facts["tokens"] == 32 * facts["rows"] < 1900  # too few to hold any out
    made["calibrated"].verify()


def divergence(bundle: Bundle, source: str) -> float:
    from export.original import original_of
    from export.sources.open import open_checkpoint

    engine = ExportEngine(Meter(), BUDGET, no_progress, said, bundle.path.parent)
    held_out = TokenSource("eval.tokens", "random:9", "valid", Reading())
    with open_checkpoint(source, seed=0) as checkpoint:
        rows = engine.first_rows(bundle, held_out, 32, 24)
        original = original_of(bundle, checkpoint)
        own = Compared(original, checkpoint)
        return engine.compare(own, Compared(bundle), rows, "random:9").divergence


def test_quality_is_measured_on_rows_that_calibration_has_not_seen(
    tmp_path: Path, folder: Path, text: Path
) -> None:
    with_data = exported(
        folder, tmp_path / "with", calibrate=str(text), calibration_tokens=2000
    ).manifest
    assert with_data.quality is not None
    assert with_data.quality.text == f"held-out rows of {text}"
    calibrated = with_data.provenance["calibration"]
    assert with_data.quality.rows == pytest.approx(calibrated["rows"] / 4, abs=1)


def test_a_budget_that_is_too_small_leaves_nothing(
    tmp_path: Path, text: Path, folder: Path
) -> None:
    with pytest.raises(BudgetError, match="5 MB"):
        exported(folder, tmp_path / "out", 5_000_000, calibrate=str(text))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_an_export_that_passes_its_budget_stops(tmp_path: Path, folder: Path) -> None:
    """The footprint is what is measured, in this process far above 5 MB."""
    with Meter(budget_bytes=5_000_000) as meter:
        engine = partial(ExportEngine, meter, 5_000_000, no_progress, said)
        with pytest.raises(BudgetError, match=r"while it wrote .*> 5 MB"):
            export_bundle(settings(folder, tmp_path / "out"), no_progress, engine)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_measured_is_said_and_costs_no_bundle(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    def refused(*_: object) -> None:
        raise BudgetError("budget 1 MB < 2 MB needed")

    monkeypatch.setattr(ExportEngine, "compare", refused)
    engine = partial(ExportEngine, Meter(), BUDGET, no_progress, notes.append)
    bundle = export_bundle(settings(folder, tmp_path / "out"), no_progress, engine)
    assert bundle.manifest.quality is None
    (note,) = notes
    assert "1 MB < 2 MB" in note and "--no-quality" in note


def test_a_reason_names_no_unfinished_folder(tmp_path: Path, folder: Path) -> None:
    notes: list[str] = []
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    engine = partial(ExportEngine, Meter(), BUDGET, no_progress, notes.append)
    export_bundle(settings(folder, tmp_path / "out"), no_progress, engine)
    reason = "not measured: the tokenizer of the bundle cannot be read"
    assert any(reason in note for note in notes), notes
    assert not any(".partial" in note for note in notes)


def test_a_tokenizer_that_is_missing_or_cannot_be_read_is_said_once(
    tmp_path: Path, folder: Path
) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": 3}))
    for number in range(2):
        notes: list[str] = []
        engine = partial(ExportEngine, Meter(), BUDGET, no_progress, notes.append)
        config = settings(folder, tmp_path / f"{number}")
        bundle = export_bundle(config, no_progress, engine, notes.append)
        assert bundle.manifest.quality is None
        assert len([note for note in notes if "tokenizer" in note]) == 1, notes
        (folder / "tokenizer.json").unlink(missing_ok=True)


def test_few_data_are_said(tmp_path: Path, folder: Path) -> None:
    notes: list[str] = []
    few = tmp_path / "few.txt"
    few.write_text("ab cd abc d bb dcba a " * 10)
    engine = partial(ExportEngine, Meter(), BUDGET, no_progress, notes.append)
    config = settings(folder, tmp_path / "out", seq_lens=(32,), calibrate=str(few))
    quality = export_bundle(config, no_progress, engine).manifest.quality
    assert any("1 row" in note or "rows read" in note for note in notes)
    assert any("tokens for calibration, of 8192" in note for note in notes)
    assert quality is not None and quality.text == "the package's own text"


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"eight_bit": "wrong_name"}, UsageError, "--eight-bit wrong_name: .* it has .*k_proj"),
        ({"bits": 16, "calibrate": "random:0"}, UsageError, "--calibrate: nothing .*--bits 16"),
        ({"calibrate": "/no/where"}, DataError, "no data at /no/where"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tmp_path: Path, folder: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        exported(folder, tmp_path / "out", **more)


def test_another_model_is_no_source(tmp_path: Path, folder: Path) -> None:
    from export.original import original_of
    from export.sources.open import open_checkpoint

    bundle = exported(folder, tmp_path / "out", quality=False)
    with (
        open_checkpoint("random:tiny-llama", seed=0) as other,
        pytest.raises(UsageError, match="is not the checkpoint of"),
    ):
        original_of(bundle, other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bits": 16, "eight_bit": "q_proj"}, "eight_bit has no effect: every linear layer has 16"),
        ({"bits": 32, "group_size": 32}, "group_size has no effect: floats"),
        ({"calibration_tokens": 100}, "calibration_tokens has no effect: it needs calibrate"),
    ],
)
def test_options_without_effect_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ExportConfig(source="model", output="out", **given)


def test_options_may_concern_the_embedding_alone() -> None:
    config = ExportConfig(source="m", output="o", bits=16, embedding_bits=4, group_size=32)
    assert config.head_bits == 4
    assert all(config.was_given(name) for name in ("bits", "embedding_bits", "group_size"))


def test_experts_are_rounded_and_that_is_said(tmp_path: Path) -> None:
    """The matrices around them are calibrated; routers have 8 bits."""
    notes: list[str] = []
    preset = "random:tiny-qwen3-moe"
    config = settings(preset, tmp_path / "b", calibrate="random:3", calibration_tokens=300)
    engine = ExportEngine(
        Meter(), BUDGET, no_progress, lambda note: notes.append(str(note)), tmp_path
    )
    calibrated = export_bundle(config, make_engine=lambda folder: engine)
    plain = exported(preset, tmp_path / "plain")
    assert any("6 matrices hold experts: these are rounded" in note for note in notes)
    manifest = calibrated.manifest
    assert manifest.provenance["calibration"]["rounded_experts"] == 6
    for name, matrix in manifest.matrices.items():
        same = matrix.error == plain.manifest.matrices[name].error
        assert same == (".switch_mlp." in name)
        assert matrix.bits == (8 if name.split(".")[-1] in ("k_proj", "v_proj", "gate") else 4)
    calibrated.verify()
