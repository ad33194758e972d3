"""Adapters of PEFT and mlx-lm: what is read, in which types, and what is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from re import escape
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.adapters import SOME, check_same, read_again, saved_adapter, written
from support.bundles import Rng, Tiny
from support.runs import here

from runtime.adapters.lora import LoraSettings
from runtime.adapters.names import coverage_of
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, OnDeviceError, UsageError
from runtime.methods.adapter_reader import MOST_CONFIG_BYTES, AdapterFiles
from runtime.methods.adapters import Adapters, lora_of

Arrays = dict[str, np.ndarray]
Theirs = Callable[[str], Path]
WEIGHTS = {"peft": "adapter_model.safetensors", "mlx": "adapters.safetensors"}
OF_ALL = {"layers_to_transform": None, "target_modules": "all-linear"}
Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture
def bundle(tiny: Tiny) -> Bundle:
    return tiny("qwen2")


@pytest.fixture
def theirs(bundle: Bundle, rng: Rng, tmp_path: Path) -> Theirs:
    """theirs(form): a folder of that tool, which may be changed."""

    def make(form: str) -> Path:
        if not (tmp_path / "ours").exists():
            saved_adapter(bundle, rng, tmp_path / "ours", **SOME, rslora=True)
        return written(bundle, tmp_path / "ours", form, tmp_path / form)

    return make


def configured(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))
    return folder


def rewritten(folder: Path, form: str, change: Callable[[Arrays], Arrays]) -> Path:
    tensors = change(load_file(folder / WEIGHTS[form]))
    whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(whole, folder / WEIGHTS[form])
    return folder


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("form", WEIGHTS)
def test_half_precision_is_converted_exactly(
    bundle: Bundle, theirs: Theirs, tmp_path: Path, form: str, dtype: Any
) -> None:
    def half(tensors: Arrays) -> Arrays:
        return {name: np.array(value).astype(dtype) for name, value in tensors.items()}

    folder = rewritten(theirs(form), form, half)
    ours = read_again(bundle, tmp_path / "ours")
    rounded = {name: value.astype(np.float32) for name, value in half(ours.tensors).items()}
    check_same(read_again(bundle, folder), Adapters(ours.manifest, rounded))


def test_settings_follow_from_tensors_and_configuration(bundle: Bundle, theirs: Theirs) -> None:
    targets = ("down_proj", "k_proj", "q_proj")
    expected = LoraSettings(rank=3, alpha=5.0, targets=targets, layers=1, rslora=True)
    folder = theirs("peft")
    assert lora_of(folder, bundle.manifest) == expected
    for layers in (1, [1], [], None):  # as PEFT takes it
        assert lora_of(configured(folder, layers_to_transform=layers), bundle.manifest) == expected
    for key in ("v_proj", "embed_tokens", r"layers\.0\.self_attn\.q_proj", "proj", "o(_proj)+"):
        patterns = {"rank_pattern": {key: 9}, "alpha_pattern": {key: 7}}
        if "+" in key:  # which is not compared, and changes nothing
            patterns = {"rank_pattern": {key: 3}, "alpha_pattern": {key: 5}}
        assert lora_of(configured(folder, **patterns), bundle.manifest) == expected
    both = {"q_proj": 3, "^model.layers.1.self_attn.q_proj": 9}  # of which PEFT takes the first
    patterns = {"rank_pattern": both, "alpha_pattern": {"[ab]_proj": 5}}
    assert lora_of(configured(folder, **patterns), bundle.manifest) == expected
    configured(folder, rank_pattern={}, alpha_pattern={})
    # the tensors count, and options that are switched off do not
    assert (
        lora_of(configured(folder, target_modules="all-linear", new_option=[]), bundle.manifest)
        == expected
    )
    plain = lora_of(configured(folder, use_rslora=None), bundle.manifest)  # which states nothing
    assert plain is not None and not plain.rslora
    found = lora_of(configured(theirs("mlx"), num_layers=16), bundle.manifest)
    assert found is not None and (found.layers, found.targets) == (1, targets)
    assert np.isclose(found.scale, expected.scale, rtol=1e-12) and not found.rslora


def test_keys_that_are_not_compared_take_no_time_of_each_pair(
    bundle: Bundle, theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, close = [0], math.isclose

    def isclose(*values: float) -> bool:
        counted[0] += 1
        return close(*values)

    keys = [f"{number}+" for number in range(100)]
    patterns = {"rank_pattern": dict.fromkeys(keys, 3), "alpha_pattern": dict.fromkeys(keys, 5)}
    folder = configured(theirs("peft"), **patterns)
    monkeypatch.setattr(math, "isclose", isclose)
    assert lora_of(folder, bundle.manifest) is not None
    assert 0 < counted[0] < 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora is True, which means DoRA"),
        ({"bias": "lora_only"}, "bias is 'lora_only', which means trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], which means whole"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alphas that differ"),
        ({"alpha_pattern": {"v_proj": 4, r"layers\.1.self_attn.q_proj": 4}}, "alphas that differ"),
        ({"alpha_pattern": {"(a+)+b": 4}}, "alphas that differ"),  # it may be any module
        ({"alpha_pattern": {"v_proj": "4"}}, "v_proj is '4', not a number"),
        ({"rank_pattern": dict.fromkeys(map(str, range(5000)), 3)}, "has 5000 keys"),
        ({"lora_bias": True}, "adapters with a bias"),
        ({"layer_replication": [[0, 2]]}, "replicated"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "its peft_type is 'IA3'; of PEFT's only LORA is supported"),
        ({"peft_type": 7}, "its peft_type is 7"),
        ({"something_new": 3}, "its something_new is 3; this is not supported"),
        ({"r": 4}, "has adapters of rank 3"),
        ({"r": 0}, "rank is 0, not from 1 to 4096"),
        ({"lora_alpha": 0}, "alpha is 0, not above 0 and at most 1e+06"),
        ({"r": "3"}, "is damaged: r is '3', not a whole number"),
        ({"lora_alpha": None}, "lora_alpha is None, not a number"),
        ({"lora_alpha": True}, "lora_alpha is True, not a number"),
        ({"lora_alpha": "16"}, "lora_alpha is '16', not a number"),
        ({"lora_alpha": 1e400}, "alpha is inf, not"),
        ({"use_rslora": "yes"}, "is damaged"),
        ({"lora_dropout": 1.0}, "dropout is 1.0"),
        ({"layers_to_transform": [0]}, "in layer 1, and "),
        ({"layers_to_transform": 0}, "says layers_to_transform [0]: one of the two"),
        ({"layers_to_transform": [0, 1]}, "says layers_to_transform [0, 1]"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform is ['1'], no numbers of layers"),
        ({"target_modules": ["q_proj", "down_proj"]}, "target_modules does not name model.layers"),
        ({"target_modules": 3}, "target_modules is 3, no names of modules"),
        ({"exclude_modules": ["k_proj"]}, "exclude_modules names model.layers.1.self_attn.k_proj"),
        ({"exclude_modules": [1]}, "exclude_modules is [1], no names of modules"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj'], no numbers by name"),
        ({"lora_dropout": []}, "lora_dropout is [], not a number"),
    ],
    ids=str,
)
def test_what_is_not_plain_lora_is_refused_by_name(
    bundle: Bundle, theirs: Theirs, change: dict[str, Any], said: str
) -> None:
    folder = configured(theirs("peft"), **change)
    with pytest.raises(BundleError, match=escape(said)) as refused:
        lora_of(folder, bundle.manifest)
    assert "adapter_config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 1}, "num_layers is 1 of 2, and leaves out model.layers.0"),
        ({"num_layers": "1"}, "num_layers is '1', not a whole number"),
        ({"keys": ["self_attn.q_proj"]}, "keys does not name model.layers.1.mlp.down_proj"),
        ({"keys": ["q_proj", "k_proj", "mlp.down_proj"]}, "keys does not name model.layers.1.self"),
        ({"keys": "q_proj"}, "keys is 'q_proj', no names of modules"),
        ({"rank": 3.0}, "rank is 3.0, not a whole number"),
        ({"dropout": None}, "dropout is None, not a number"),
    ],
    ids=str,
)
def test_what_mlx_lm_would_leave_out_is_refused(
    bundle: Bundle, theirs: Theirs, change: dict[str, Any], said: str
) -> None:
    folder = theirs("mlx")
    if change.get("num_layers") == 1:
        rewritten(folder, "mlx", _renamed("layers.1.", "layers.0."))
    config = json.loads((folder / "adapter_config.json").read_bytes())
    outer = {key: value for key, value in change.items() if key == "num_layers"}
    inner = {**config["lora_parameters"], **{k: v for k, v in change.items() if k not in outer}}
    configured(folder, lora_parameters=inner, **outer)
    with pytest.raises(BundleError, match=escape(said)):
        lora_of(folder, bundle.manifest)


def test_another_kind_of_mlx_lm_is_refused(bundle: Bundle, theirs: Theirs) -> None:
    with pytest.raises(BundleError, match="its fine_tune_type is 'dora'; only lora is supported"):
        lora_of(configured(theirs("mlx"), fine_tune_type="dora"), bundle.manifest)


def _renamed(old: str, new: str) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def _with(name: str, value: np.ndarray) -> Callable[[Arrays], Arrays]:
    return lambda tensors: {**tensors, name: value}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", "_orig_mod.base_model.model."),  # of a compiled model
        ("base_model.model.", "base_model.model._orig_mod."),
        ("self_attn", "self_attn._orig_mod"),
        ("base_model.model.", "module.base_model.model._fsdp_wrapped_module."),
        ("base_model.model.", "_orig_mod.module.base_model.model."),
        ("base_model.model.", ""),
        ("weight", "default.weight"),
        ("base_model.model.model.", "base_model.model."),  # of a model without its head
        ("base_model.model.", "base_model.model.language_model."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
    ],
)
def test_names_that_say_how_a_model_was_wrapped_are_read(
    bundle: Bundle, theirs: Theirs, tmp_path: Path, old: str, new: str
) -> None:
    folder = rewritten(theirs("peft"), "peft", _renamed(old, new))
    check_same(read_again(bundle, folder), read_again(bundle, tmp_path / "ours"))


@pytest.mark.parametrize("older", [False, True])
def test_adapters_of_mlx_vlm_are_read(
    bundle: Bundle, theirs: Theirs, tmp_path: Path, older: bool
) -> None:
    expected = read_again(bundle, tmp_path / "ours") if theirs("mlx") else None
    assert expected is not None
    folder = rewritten(
        tmp_path / "mlx", "mlx", _renamed("model.layers", "language_model.model.layers")
    )
    configured(folder, num_layers=-1)
    if older:
        rewritten(folder, "mlx", _renamed("lora_a", "A"))
        rewritten(folder, "mlx", _renamed("lora_b", "B"))
        config = {"rank": 3, "alpha": expected.manifest.lora.scale, "dropout": 0.0}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    check_same(read_again(bundle, folder), expected)


_ONE = np.zeros((3, 128), np.float32)
_TOWER = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with("base_model.model.lm_head.lora_A.weight", _ONE), "PEFT has adapted one of the two"),
        (_with("base_model.model.lm_head.weight", _ONE), "'base_model.model.lm_head.weight'; only"),
        (_with(f"{Q}.lora_magnitude_vector", _ONE), "vector', which means DoRA"),
        (_with(f"{Q}.lora_B.bias", _ONE), "lora_B.bias', which means adapters with a bias; only"),
        (_with(_TOWER, _ONE), "1 of its 7 tensors adapt what sees or hears, such as 'base_model."),
        (_with("more", _ONE), "it holds 'more'; only"),
        (_with(f"{Q}.lora_A.weight", np.zeros((4, 128), np.float32)), "do not fit each other"),
        (_with(f"{Q}.lora_A.weight", np.zeros(3, np.float32)), "do not fit each other"),
        (_with(f"{Q}.lora_A.weight", np.full((3, 128), np.nan, np.float32)), "not finite"),
        (_with(f"{Q}.lora_A.weight", np.zeros((3, 128), np.float64)), "has type F64"),
        (_with(f"{Q}.lora_A.weight", np.zeros((3, 64), np.float32)), "is (64, 3), expected (128"),
        (_renamed("down_proj.lora_A", "up_proj.lora_A"), "only one of its two tensors"),
        (_renamed("layers.1.mlp", "layers.0.mlp"), "6 tensors are missing, such as model.layers.0"),
        (_renamed("layers.1.", "layers.0."), "it has layer 0, expected are layers 0 to 1; 6"),
        (_renamed("layers.1.", "layers.9."), "it has layer 9, expected are layer 1"),
        (_renamed("layers.1.", "layers.1234567890."), "only linear layers and embeddings"),
        (_renamed("q_proj", "w_proj"), "does not fit the bundle"),
        (lambda tensors: {}, "holds no tensors"),
    ],
    ids=range(18),
)
def test_tensors_that_do_not_fit_are_refused(
    bundle: Bundle,
    theirs: Theirs,
    change: Callable[[Arrays], Arrays],
    said: str,
) -> None:
    folder = configured(rewritten(theirs("peft"), "peft", change), **OF_ALL)
    with pytest.raises(BundleError, match=escape(said)):
        read_again(bundle, folder)


def test_another_rank_is_told_with_both_and_the_way_out(
    bundle: Bundle, theirs: Theirs, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.safetensors"
    (theirs("mlx") / WEIGHTS["mlx"]).rename(alone)
    with pytest.raises(BundleError) as refused:
        read_again(bundle, alone)
    said = str(refused.value)
    assert "have rank 3, and rank 8 is expected" in said and "--lora-rank 3" in said
    assert "there is no adapter_config.json" in said


def test_only_errors_of_its_file_are_an_adapters(bundle: Bundle, theirs: Theirs) -> None:
    files = AdapterFiles.at(theirs("peft"), bundle.manifest)
    with pytest.raises(OSError, match="of another file"), files.opened(3):
        raise OSError("of another file")
    files.weights.write_bytes(files.weights.read_bytes()[:-1])
    said = r"adapter_model.safetensors cannot be read: .*; fetch or save it again, as .safetensors$"
    with pytest.raises(BundleError, match=said), files.opened(3):
        pass


@pytest.mark.parametrize("form", ["mlx", "peft"])
def test_a_configuration_that_is_far_too_large_is_not_read(
    bundle: Bundle, theirs: Theirs, form: str
) -> None:
    folder = theirs(form)
    config = folder / "adapter_config.json"
    config.write_bytes(config.read_bytes() + b" " * MOST_CONFIG_BYTES)
    with pytest.raises(BundleError, match="not a configuration of an adapter, which has 1,048,576"):
        read_again(bundle, folder)


def test_files_that_are_not_whole_are_refused(
    bundle: Bundle, theirs: Theirs, tmp_path: Path
) -> None:
    folder = theirs("peft")
    config = (folder / "adapter_config.json").read_bytes()
    (folder / "adapter_config.json").unlink()
    for source in (folder, folder / WEIGHTS["peft"]):
        with pytest.raises(OnDeviceError):
            read_again(bundle, source)
    with pytest.raises(BundleError, match="which says PEFT's lora_alpha"):
        lora_of(folder, bundle.manifest)
    (folder / "adapter_config.json").write_bytes(config)
    (folder / WEIGHTS["peft"]).rename(folder / "adapter_model.bin")
    with pytest.raises(BundleError, match="is a pickle"):
        lora_of(folder, bundle.manifest)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(BundleError, match="cannot be read"):
        lora_of(folder, bundle.manifest)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(BundleError, match="is damaged"):
        lora_of(folder, bundle.manifest)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match="An adapter is a run that has saved"):
        lora_of(tmp_path / "empty", bundle.manifest)
    full = tmp_path / "full"
    full.mkdir()
    (full / "weights.slots").touch()
    with pytest.raises(UsageError, match="holds no adapter; ondevice replay"):
        lora_of(full, bundle.manifest)
    refused = here("adapter", full, "--bundle", bundle.path, "--to", "peft", "-o", tmp_path / "x")
    assert refused.returncode == 2 and "ondevice replay" in refused.stderr


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",), ("in_proj", "w2"), ("out_proj",)])
def test_layers_of_several_kinds_have_the_adapters_that_they_can(
    tiny: Tiny, rng: Rng, tmp_path: Path, form: str, targets: object
) -> None:
    bundle = tiny("lfm2")  # a convolution, and an attention
    ours = saved_adapter(bundle, rng, tmp_path / "ours", rank=2, targets=targets)
    folder = written(bundle, tmp_path / "ours", form, tmp_path / form)
    check_same(read_again(bundle, folder), ours)


def test_a_layer_without_the_matrix_is_refused(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("lfm2")
    saved_adapter(bundle, rng, tmp_path / "ours", rank=2, targets=("q_proj",))
    folder = written(bundle, tmp_path / "ours", "peft", tmp_path / "peft")
    rewritten(folder, "peft", _renamed("layers.1.", "layers.2."))
    with pytest.raises(BundleError, match="it has layer 2, expected are no layer; 2 tensors are"):
        read_again(bundle, folder)


def test_coverage_is_one_rank_on_modules_of_layers(rng: Rng) -> None:
    first, last = sorted(map(int, rng.integers(0, 40, 2)))
    rank = int(rng.integers(1, 9))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(first, last + 1):
        for path in ("self_attn.q_proj", "mlp.up_proj"):
            shapes[f"model.layers.{layer}.{path}.lora_a"] = (16, rank)
            shapes[f"model.layers.{layer}.{path}.lora_b"] = (rank, 8)
    found = coverage_of(shapes)
    assert found.counted(last + 3) == last + 3 - first
    assert found == (rank, ("q_proj", "up_proj"), first, last)
    name = f"model.layers.{last}.mlp.up_proj"
    shapes |= {f"{name}.lora_a": (16, rank + 1), f"{name}.lora_b": (rank + 1, 8)}
    with pytest.raises(ValueError, match=f"different ranks .*{rank}.*{rank + 1}"):
        coverage_of(shapes)
    with pytest.raises(ValueError, match="it holds 'x', which is no tensor of an adapter"):
        coverage_of({"x": (1,)})
