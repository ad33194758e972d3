"""Runs that train all parameters: resumed, replayed to a bundle, evaluated, refused."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from support.bundles import Tiny
from support.runs import (
    here,
    json_of,
    killed_and_resumed,
    metrics_of,
    refuses,
    struck,
    succeeds,
    summary_of,
    train_arguments,
    unbound,
)

from runtime.bundle.store import WEIGHTS, open_bundle
from runtime.config.base import load
from runtime.config.train import TrainConfig
from runtime.methods.full.run_weights import open_weights
from runtime.run.folder import RunFolder
from runtime.storage.saves import SLOTS

STEPS = 4


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Path:
    """A bundle whose embedding is the head as well, stored as bfloat16."""
    return tiny("gemma3", trainable="full", storage="bfloat16").path


def arguments(bundle: Path, run: Path, **more: object) -> list[str]:
    given = {"method": "mezo", "learning-rate": 1e-3, **more}
    return train_arguments(bundle, run, STEPS, **given)


def weights_in(run: Path, bundle: Path) -> dict[str, bytes]:
    config = load(TrainConfig, run / "config.toml", {})
    weights = open_weights(config, open_bundle(str(bundle)), run, STEPS, writable=False)
    return {
        name: weights.stored(name, 0, weights.tensors[index][name][0]).tobytes()
        for name, index in weights.owner.items()
    }


def steps_of(run: Path) -> list[tuple[object, object]]:
    return [(line["step"], line["loss"]) for line in metrics_of(run)]


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("full") / "run"
    done = succeeds(*arguments(model, path))
    assert f"ondevice replay {path} --output BUNDLE writes the trained model" in done.stdout
    return path


@pytest.fixture(scope="module")
def trained(run: Path) -> Path:
    """The trained model, which a replay has written as a bundle."""
    facts = json_of("replay", run, "--output", run.with_name("trained"), by=here)
    assert facts["identical"] is True and facts["steps"] == STEPS
    return run.with_name("trained")


def test_the_bundle_stays_as_it_is_and_the_run_holds_no_adapter(model: Path, run: Path) -> None:
    succeeds("inspect", model, "--verify", by=here)
    assert not list(run.glob("**/adapter*"))
    for words in (["eval", model, "--data", "random:1"], ["train", model, "--data", "random:1"]):
        more = ["--trainable", "lora"] if words[0] == "train" else []
        refuses(2, "holds no adapter; ondevice replay", *words, *more, "--adapter", run)
    summary = summary_of(run)
    assert summary["trained"] == "full"
    assert summary["trainable_parameters"] == open_bundle(str(model)).manifest.parameters


def test_replay_writes_the_trained_model_as_a_bundle(model: Path, run: Path, trained: Path) -> None:
    succeeds("inspect", trained, "--verify", by=here)
    before, after = (np.fromfile(one / WEIGHTS, np.uint8) for one in (model, trained))
    assert len(before) == len(after) and (before != after).any()
    words = ["--data", "random:9", "--max-seq-length", 24]
    assert len({json_of("eval", one, *words, by=here)["loss"] for one in (model, trained)}) == 2
    refuses(2, "exists", "replay", run, "--output", trained)


def test_lost_weights_are_rebuilt_from_the_log_and_that_is_said(
    model: Path, run: Path, tmp_path: Path
) -> None:
    words = arguments(model, tmp_path / "run")
    assert struck(signal.SIGKILL, "step 3", *words).returncode == -signal.SIGKILL
    (tmp_path / "run" / SLOTS).unlink()
    done = succeeds("train", "--resume", tmp_path / "run")
    assert "blocks are damaged or gone: the first step rebuilds them" in done.stderr
    assert weights_in(tmp_path / "run", model) == weights_in(run, model)


def test_the_best_step_is_what_replay_writes(model: Path, tmp_path: Path) -> None:
    more = {"eval-data": "random:9", "eval-every": 2, "eval-rows": 2, "learning-rate": 1e-2}
    words = [*arguments(model, tmp_path / "run", **more), "--keep-best"]
    succeeds(*words)
    best = summary_of(tmp_path / "run")["best"]
    facts = json_of("replay", tmp_path / "run", "-o", tmp_path / "best", by=here)
    assert facts["best_step"] == best["step"]
    words = ["--data", "random:9", "--eval-rows", 2, "--max-seq-length", 24]
    loss = json_of("eval", tmp_path / "best", *words, by=here)["loss"]
    assert loss == pytest.approx(best["loss"], rel=1e-6)


@pytest.mark.parametrize(
    "method",
    ["mezo", "one-point", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fzoo", "kzoo"))],
)
def test_killed_resumed_and_replayed_is_the_same(
    model: Path, run: Path, rng: np.random.Generator, tmp_path: Path, method: str
) -> None:
    whole, killed, options = run, tmp_path / "killed", {"eval-data": "random:9", "eval-every": 2}
    if method != "mezo":
        whole = tmp_path / "whole"
        options = {"method": method, "learning-rate": 1e-5, "weight-decay": 0.1}
        succeeds(*arguments(model, whole, **options))
    step = int(rng.integers(1, STEPS))
    done = killed_and_resumed(killed, f"step {step}", arguments(model, killed, **options))
    assert "damaged" not in done.stderr
    assert steps_of(killed) == steps_of(whole)
    assert weights_in(killed, model) == weights_in(whole, model)
    assert json_of("replay", killed, "-o", tmp_path / "trained", by=here)["identical"] is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zo-optimizer": "adam"}, "--zo-optimizer adam is not for --trainable full"),
        ({"method": "mebp"}, "--trainable full: mebp trains adapters only"),
        ({"method": "zo-act"}, "--trainable full: zo-act trains adapters only"),
        ({"method": "hizoo"}, "--trainable full is not for hizoo"),
        ({"zo-scaling": "parameter-norm"}, "--zo-scaling parameter-norm is not for --trainable"),
        ({"lora-rank": 4}, "--lora-rank: with --trainable full there are no adapters"),
        ({"adapter": "somewhere"}, "--adapter: with --trainable full there are no adapters"),
        ({"budget": "20MB"}, "the smallest that fits is"),
    ],
)
def test_what_full_training_cannot_do_is_refused(
    model: Path, tmp_path: Path, options: dict[str, object], said: str
) -> None:
    refused = here(*arguments(model, tmp_path / "run", **options))
    assert refused.returncode in (2, 3) and said in refused.stderr
    assert not (tmp_path / "run").exists()


def damaged_copy(run: Path, place: Path, damage: str) -> Path:
    """A copy of a run whose slots are lost in some way."""
    shutil.copytree(run, place)
    slots = place / "weights.slots"
    if damage == "zeros":
        slots.write_bytes(bytes(slots.stat().st_size))
    elif damage == "cut":
        os.truncate(slots, slots.stat().st_size // 2)
    else:
        slots.unlink()
        if damage == "pipe":
            os.mkfifo(slots)
    return place


@pytest.mark.parametrize("damage", ["zeros", "cut", "gone", "pipe"])
def test_weights_that_are_lost_are_written_from_the_log_but_not_called_identical(
    run: Path, trained: Path, tmp_path: Path, damage: str
) -> None:
    copy = damaged_copy(run, tmp_path / "run", damage)
    done = succeeds("replay", copy, "--output", tmp_path / "again", by=here)
    assert "identical" not in done.stdout and "it is not compared" in done.stderr
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


def test_weights_that_are_being_trained_are_not_compared(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    with RunFolder(copy).locked():
        done = succeeds("replay", copy, "--output", tmp_path / "trained", by=here)
    assert "not compared with what the run holds: another process is training it" in done.stderr


def test_weights_that_diverged_are_not_written(tiny: Tiny, tmp_path: Path) -> None:
    bundle = tiny("qwen2", trainable="full", storage="float16").path
    words = train_arguments(
        bundle, tmp_path / "run", 3, method="mezo", learning_rate=1e6, lr_schedule="constant"
    )
    unbound(*words)  # it may have ended at a loss that is not finite
    words = ["replay", tmp_path / "run", "--output", tmp_path / "trained"]
    refuses(1, "no finite numbers", *words, by=unbound)
    assert not (tmp_path / "trained").exists()


def test_advice_of_a_run_without_adapters_names_none(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    done = here("train", "--resume", copy)
    assert f"train the model that ondevice replay {copy} --output BUNDLE writes" in done.stderr
    (copy / "config.toml").write_text((copy / "config.toml").read_text() + "\n")
    refused = here("train", "--resume", copy)
    assert refused.returncode == 4 and "--adapter" not in refused.stderr


def test_quantized_weights_are_not_trained_themselves(tiny: Tiny, tmp_path: Path) -> None:
    words = arguments(tiny("qwen2").path, tmp_path / "run", trainable="full")
    assert "--trainable full" in refuses(2, "are quantized", *words).stderr


def test_adapters_can_be_trained_on_such_a_bundle(model: Path, tmp_path: Path) -> None:
    succeeds(*train_arguments(model, tmp_path / "run", STEPS, trainable="lora", method="mebp"))
    assert (tmp_path / "run" / "adapters.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--storage", "float16"], "storage has no effect: it needs trainable full"),
        (["--trainable", "full", "--bits", "8"], "bits has no effect"),
        (["--trainable", "full", "--calibrate", "x"], "calibrate has no effect"),
        (["--trainable", "prefix"], "a prefix needs no export of its own"),
    ],
)
def test_export_refuses_what_contradicts(tmp_path: Path, options: list[str], said: str) -> None:
    refuses(2, said, "export", "random:tiny-qwen2", "-o", tmp_path / "no", *options)
