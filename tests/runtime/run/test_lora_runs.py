"""Runs with LoRA settings of their own or from other tools' adapters: saves and refusals."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.adapters import SOME, saved_adapter, written
from support.bundles import Tiny
from support.runs import adapter, here, json_of, refuses, succeeds, summary_of, train_arguments
from support.shared import Shared

from runtime.core.units import parse_bytes

STEPS = 3
SHAPE = {"lora_rank": 3, "lora_alpha": 6, "lora_targets": "q_proj,down_proj", "lora_layers": 2}
LORA = {
    **{"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"]},
    **{"layers": 2, "dropout": 0.0, "rslora": True},
}


def arguments(bundle: Path, run: Path, steps: int = STEPS, **more: object) -> list[str]:
    """A run with every setting of the adapters' shape."""
    return [*train_arguments(bundle, run, steps, **SHAPE, **more), "--rslora"]


def config_of(run: Path) -> dict[str, Any]:
    return tomllib.loads((run / "config.toml").read_text())


def adapter_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.fixture(scope="module")
def bundle(tiny: Tiny) -> Path:
    """One of three layers, of which some have adapters."""
    return tiny("gemma3", seq_lens=(16, 32), device="auto").path


@pytest.fixture(scope="module")
def run(bundle: Path, shared: Shared) -> Path:
    def train(path: Path) -> None:
        succeeds(*arguments(bundle, path, lora_dropout=0.2, grad_accumulation=2))

    return shared("a run with LoRA settings", train)


def test_the_settings_are_kept_with_all_that_is_saved(run: Path) -> None:
    config, lora = config_of(run), {**LORA, "dropout": 0.2}
    assert {name: config[name] for name in SHAPE} == SHAPE
    assert config["rslora"] is True and config["lora_dropout"] == 0.2
    (save,) = run.glob("saves/step-*")
    for folder in (run, save):
        found = adapter_config(folder)
        assert found["ondevice"]["lora"] == lora and found["num_layers"] == 2
        assert found["lora_parameters"] == {
            "rank": 3, "scale": 6 / 3**0.5, "dropout": 0.2,
            "keys": ["mlp.down_proj", "self_attn.q_proj"],
        }  # fmt: skip
    tensors = load_file(run / "adapters.safetensors")
    assert len(tensors) == 2 * 2 * 2  # A and B, layers, targets
    assert all(3 in tensor.shape for tensor in tensors.values())
    assert not any(name.startswith("model.layers.0.") for name in tensors)
    summary = summary_of(run)
    assert summary["lora"] == lora
    assert summary["trainable_parameters"] == sum(tensor.size for tensor in tensors.values())
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"]


def test_dropout_changes_what_is_learnt_and_the_seed_what_is_dropped(
    bundle: Path, run: Path, tmp_path: Path
) -> None:
    same = {"grad_accumulation": 2, "adapter": run, "learning_rate": 1e-3}
    found = set()
    for name, options in {
        "without": {"lora_dropout": 0},
        "with": {},  # that of the adapter
        "again": {"lora_dropout": 0.2},
        "more": {"lora_dropout": 0.5},
    }.items():
        succeeds(*train_arguments(bundle, tmp_path / name, 1, **same, **options))
        found.add(adapter(tmp_path / name))
    assert adapter(tmp_path / "with") == adapter(tmp_path / "again")
    assert len(found) == 3


def test_what_is_the_default_may_be_given(bundle: Path, tmp_path: Path) -> None:
    unset, given = tmp_path / "unset", tmp_path / "given"
    succeeds(*train_arguments(bundle, unset, 1))
    options = {"lora_rank": 8, "lora_alpha": 16, "lora_targets": "all-linear", "lora_layers": -1}
    succeeds(*train_arguments(bundle, given, 1, **options, lora_dropout=0), "--no-rslora")
    assert adapter(given) == adapter(unset)
    assert adapter_config(given) == adapter_config(unset)
    written = {**config_of(given), "output": ""}
    assert {**config_of(unset), "output": ""} == written


def test_an_adapter_brings_its_settings(bundle: Path, run: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    succeeds(*train_arguments(bundle, more, 1, adapter=copy))
    assert adapter_config(more) == adapter_config(run)
    shutil.rmtree(copy)  # it is not read again
    succeeds("train", "--resume", more, "--steps", 2)
    data = ["--data", "random:1", "--max-seq-length", 24]
    given = ([], ["--adapter", run], ["--adapter", more])
    assert len({json_of("eval", bundle, *data, *words, by=here)["loss"] for words in given}) == 3


@pytest.mark.parametrize(
    ("option", "value", "there"),
    [
        ("lora_rank", 8, "--lora-rank 3"),
        ("lora_alpha", 7, "--lora-alpha 6"),
        ("lora_targets", "all-linear", "--lora-targets q_proj,down_proj"),
        ("lora_layers", -1, "--lora-layers 2"),
    ],
)
def test_an_adapter_of_other_settings_is_refused_with_both(
    bundle: Path, run: Path, tmp_path: Path, option: str, value: object, there: str
) -> None:
    other = tmp_path / "other"
    given = f"--{option.replace('_', '-')} {value}"
    words = train_arguments(bundle, other, 2, adapter=run, **{option: value})
    assert there in refuses(2, given, *words).stderr and not other.exists()
    plan = ("plan", bundle, "--max-seq-length=24", "--adapter", run)
    refuses(2, there, *plan, *given.split())
    succeeds(*plan, "--lora-targets=down_proj,q_proj", "--lora-rank=3", "--rslora", by=here)
    refuses(2, "has --rslora", *plan, "--no-rslora")


def test_what_the_model_lacks_is_refused(bundle: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for options, said in (
        ({"lora_targets": "q_proj,w_proj"}, ("w_proj", "down_proj, gate_proj, k_proj")),
        ({"lora_layers": 9}, ("--lora-layers 9", "has 3 layers")),
        ({"lora_layers": 0}, ("lora_layers is 0", "1 or more, or -1")),
        ({"lora_rank": 0}, ("lora_rank is 0",)),
        ({"lora_dropout": 1}, ("lora_dropout is 1", "from 0 to 0.99")),
        ({"lora_dropout": 0.1, "method": "mezo"}, ("--lora-dropout 0.1: mezo has no dropout",)),
    ):
        for word in said:
            refuses(2, word, *train_arguments(bundle, run, 2, **options))
        assert not run.exists()


def test_mezo_goes_on_from_an_adapter_with_dropout_once_it_is_switched_off(
    bundle: Path, run: Path, tmp_path: Path
) -> None:
    options = {"adapter": run, "method": "mezo"}
    refuses(2, "give --lora-dropout 0", *train_arguments(bundle, tmp_path / "run", 2, **options))
    succeeds(*train_arguments(bundle, tmp_path / "run", 2, **options, lora_dropout=0))


@pytest.mark.parametrize(
    "change",
    [
        {"ondevice": {"lora": {"rank": 0, "alpha": 1.0, "targets": "all-linear"}}},
        {"ondevice": {"lora": {"rank": 3, "alpha": 6.0, "targets": "q_proj"}}},
        {"ondevice": {"lora": {**LORA, "dropout": 1.0}}},
        {"ondevice": {"lora": {**LORA, "more": 1}}},
        {"ondevice": {"lora": 5}},
        {"ondevice": 5},
        {"lora_parameters": {"rank": 3, "scale": 5.0}},
        {"lora_parameters": {"rank": 3}},
        {"lora_parameters": {"rank": 3, "scale": 10**400}},
    ],
    ids=str,
)
def test_damaged_configurations_are_refused(
    bundle: Path, run: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(run / "adapters.safetensors", copy)
    (copy / "adapter_config.json").write_text(json.dumps({**adapter_config(run), **change}))
    refuses(4, "adapter_config.json", "eval", bundle, "--adapter", copy, "--data", "random:1")


def test_settings_stand_in_for_a_lost_configuration(
    bundle: Path, run: Path, tmp_path: Path
) -> None:
    alone = Path(shutil.copy(run / "adapters.safetensors", tmp_path))
    given = {**SHAPE, "adapter": alone}
    succeeds(*train_arguments(bundle, tmp_path / "more", 1, **given), "--rslora")


def test_fewer_layers_plan_less(bundle: Path) -> None:
    few, all_ = (
        json_of("plan", bundle, "--max-seq-length=24", f"--lora-layers={layers}", by=here)
        for layers in (1, 3)
    )
    reversed_ = [[one["backward_bytes"] > 0 for one in plan["blocks"]] for plan in (few, all_)]
    assert reversed_ == [[False] * 3 + [True] * 2, [False] + [True] * 4]
    assert few["scratch_disk_bytes"] < all_["scratch_disk_bytes"] <= parse_bytes("1GB")


def test_a_run_from_another_tools_adapter_is_that_from_ours(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path
) -> None:
    bundle = tiny("gemma3", seq_lens=(16, 32), device="auto")
    saved_adapter(bundle, rng, tmp_path / "ours", **SOME)
    sources = {"ours": tmp_path / "ours"}
    for form in ("peft", "mlx"):
        sources[form] = written(bundle, tmp_path / "ours", form, tmp_path / form)
    losses = set()
    for source in sources.values():
        data = ["--data", "random:1", "--max-seq-length", 24]
        losses.add(json_of("eval", bundle.path, "--adapter", source, *data, by=here)["loss"])
        succeeds("plan", bundle.path, "--max-seq-length=24", "--adapter", source, "--json", by=here)
    assert len(losses) == 1
    runs = {name: tmp_path / f"run-{name}" for name in ("ours", "peft")}
    for steps, name in ((2, "ours"), (1, "peft")):
        options = {"adapter": sources[name], "lr_schedule": "constant"}
        succeeds(*train_arguments(bundle.path, runs[name], steps, **options))
    assert adapter(runs["peft"]) != adapter(runs["ours"])
    shutil.rmtree(sources["peft"])
    succeeds("train", "--resume", runs["peft"], "--steps", 2)
    assert adapter(runs["peft"]) == adapter(runs["ours"])


def test_an_unknown_scale_is_said_before_training_with_the_default(
    tiny: Tiny, rng: np.random.Generator, tmp_path: Path
) -> None:
    bundle = tiny("qwen2", device="auto")
    saved_adapter(bundle, rng, tmp_path / "ours")
    mlx = written(bundle, tmp_path / "ours", "mlx", tmp_path / "mlx")
    (mlx / "adapter_config.json").unlink()
    for name, alpha in (("default", {}), ("given", {"lora_alpha": 7})):
        options = {"adapter": mlx, **alpha}
        done = succeeds(*train_arguments(bundle.path, tmp_path / name, 1, **options), by=here)
        assert ("there is no adapter_config.json that says" in done.stderr) == (not alpha)
        assert ("--lora-alpha gives another" in done.stderr) == (not alpha)
    plan = succeeds("plan", bundle.path, "--adapter", mlx, by=here)
    assert "; --lora-alpha gives another" in plan.stderr
    done = succeeds("eval", bundle.path, "--adapter", mlx, "--data", "random:1", by=here)
    assert "the bundle's default is taken, 2 (alpha 16" in done.stderr
