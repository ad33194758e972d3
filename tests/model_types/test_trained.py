"""Every model type that works, as transformers writes it: trained, resumed, and used elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from oracles import double
from oracles import whole_model as reference
from support.adapters import saved_adapter
from support.bundles import runnable, settings
from support.fusing import fused_model, silent
from support.logits import apart, engine_logits
from support.lora import with_lora
from support.models import CLOSE, Rng, adapters_of, agree, errors_of, mebp, model_of, row_of
from support.peers import TORCH, interpreter, several_peft_logits
from support.runs import adapter, here, killed_and_resumed, succeeds, summary_of, train_arguments

from export.bundle import export_bundle
from export.cut.stand_ins import activations_of
from export.fused.checkpoint import write_checkpoint
from export.sources.model_classes import arguments_of
from export.sources.verified import is_verified, tried_types
from model_types.trial import made_elsewhere
from runtime.bundle.store import Bundle
from runtime.core.errors import BundleError, UsageError
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise

BUCKET = 64  # longer than the windows of the tiny models
PREDICTED_WITHIN = 0.05
EPSILON = 1e-2
CLOSE_ELSEWHERE = 1e-4  # PyTorch rounds in another order
METHODS = ("mebp", "mezo")
Norm = Callable[[mx.array, mx.array | None, float], mx.array]
ALONE = ("muse_glimmer",)  # whose text model transformers has inside of another alone
# whose scores have no scale, so that softmax saturates: gradients change 40 to 90 times as much as
# the states at which they are taken, and those of float32 autograd are as far from float64
ENLARGING = ("gemma4", "gemma4_text", "gemma4_unified", "muse_glimmer")

pytestmark = pytest.mark.slow
TYPES = sorted(filter(is_verified, tried_types()))
each_type = pytest.mark.parametrize("model_type", TYPES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Of the types whose tests run: a folder each that transformers has written."""
    return made_for(request, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The same, with the weights that the classes of transformers begin with."""
    return made_for(request, tmp_path_factory.mktemp("initial"), initial=True)


def made_for(request: pytest.FixtureRequest, folder: Path, **how: bool) -> Path:
    interpreter(*TORCH)
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    types = {call.params["model_type"] for call in calls if call and "model_type" in call.params}
    made_elsewhere(folder, sorted(types & {*TYPES}), 7, changed=False, **how)
    return folder


def exported(folder: Path, model_type: str) -> Bundle:
    output = folder / f"bundle of {model_type}"
    if not output.exists():
        export_bundle(settings(folder / model_type, output, bits=32, seq_lens=(32, BUCKET)))
    return runnable(output)


@each_type
@pytest.mark.parametrize("weights", ["initial", "checkpoints"])
def test_gradients_are_those_of_float64_and_losses_those_of_a_step(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    rng: Rng,
    weights: str,
    model_type: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = exported(request.getfixturevalue(weights), model_type)
    as_configured(bundle, monkeypatch)
    adapters = adapters_of(with_lora(bundle, targets=plain_linears(bundle)), rng)
    bundle = bundle.with_lora(adapters.manifest.lora)
    rows = [row_of(bundle, rng, BUCKET), row_of(bundle, rng, 40)]
    pairs = [(row.tokens, row.scored) for row in rows]
    model = model_of(bundle, BUCKET, slices=True)
    loss, found = mebp(model, adapters, rows, tmp_path, kept=1)
    dense = reference.dense_model(bundle, adapters)
    _, rounded = reference.gradients(dense, pairs)
    dense = reference.in_double(dense)
    expected_loss, expected = reference.gradients(dense, pairs)
    assert loss.loss_sum / loss.scored_tokens == pytest.approx(expected_loss, rel=1e-5)
    states = [reference.hidden_states(model, adapters, row) for row in rows]
    layers = [block.name for block in bundle.manifest.layers]
    with reference.from_states(dense, layers, states) as errors:
        _, there = reference.gradients(dense, pairs)
    ours, at_states, of_float32 = (
        max(errors_of(*pair).values())
        for pair in ((found, expected), (found, there), (rounded, expected))
    )
    print(f"{model_type}, {weights}: {ours:.1e}, {at_states:.1e} at states, {max(errors):.1e} of a")
    print(f"state; float32 autograd {of_float32:.1e}")
    assert max(errors) <= CLOSE
    agree(found, there)
    # the states are rounded, and the gradients there are others: see ENLARGING
    plain = weights == "initial" and model_type not in ENLARGING
    agree(found, expected, CLOSE if plain else max(CLOSE, 2 * of_float32))
    for sign in (1, -1):
        moved = perturbed(adapters, sign * EPSILON)
        loss = reference.plain_loss(model_of(bundle, BUCKET), moved, rows)
        dense = reference.dense_model(bundle, moved)
        expected_loss = reference.batch_loss(dense, pairs).item()
        assert loss == pytest.approx(expected_loss, rel=1e-5)


def as_configured(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mlx-lm's class compute what the configuration says, where it has numbers of its own."""
    config = bundle.manifest.config
    for name, function in activations_of(config).items():
        monkeypatch.setattr(nn, name, function)
    epsilon = config.get("rms_norm_eps")
    if epsilon is not None and "rms_norm_eps" not in arguments_of(bundle.manifest.family):
        for place, norm in ((mx.fast, mx.fast.rms_norm), (double, double.rms_norm)):
            fixed = partial(_with_epsilon, norm, epsilon)
            monkeypatch.setattr(place, "rms_norm", fixed)


def _with_epsilon(
    norm: Norm, epsilon: float, x: mx.array, weight: mx.array | None, eps: float
) -> mx.array:
    return norm(x, weight, epsilon)


def plain_linears(bundle: Bundle) -> tuple[str, ...]:
    """The last parts of the names of matrices that mlx-lm's class has as linear layers.

    Routers that multiply by a matrix of their own are none, and mlx-lm adapts linear layers only.
    """
    modules = dict(reference.dense_model(bundle).named_modules())
    linears = {path.rpartition(".")[2] for path, one in modules.items() if type(one) is nn.Linear}
    return tuple(sorted(linears & {*bundle.manifest.linear_names}))


def perturbed(adapters: Adapters, by: float) -> Adapters:
    noise = Noise(3)
    moved = {
        name: value + noise.draw(0, 0, name, value.shape) * by
        for name, value in adapters.tensors.items()
    }
    return Adapters(adapters.manifest, moved)


@each_type
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_as_if_nothing_had_been_within_its_prediction(
    checkpoints: Path, tmp_path: Path, model_type: str, method: str
) -> None:
    bundle = exported(checkpoints, model_type)
    whole = train_arguments(bundle.path, tmp_path / "whole", 3, method=method)
    succeeds(*whole)
    killed_and_resumed(
        tmp_path / "killed",
        "step 2",
        train_arguments(bundle.path, tmp_path / "killed", 3, method=method),
    )
    assert adapter(tmp_path / "killed") == adapter(tmp_path / "whole")
    summary = summary_of(tmp_path / "whole")
    predicted, measured = summary["predicted_peak_bytes"], summary["peak_footprint_bytes"]
    print(model_type, method, f"{predicted / measured - 1:+.1%}")
    assert measured <= (1 + PREDICTED_WITHIN) * predicted


@each_type
def test_adapters_and_fused_models_are_used_elsewhere(
    checkpoints: Path, tmp_path: Path, rng: Rng, model_type: str
) -> None:
    """What transformers or PEFT does not have is refused by name."""
    model, bundle = checkpoints / model_type, exported(checkpoints, model_type)
    tokens = rng.integers(0, bundle.manifest.vocab_size, 48)
    adapters = saved_adapter(bundle, rng, tmp_path / "ours")
    pairs: dict[str, tuple[Path, str]] = {}
    to = ("adapter", tmp_path / "ours", "--bundle", bundle.path, "--to", "peft", "-o")
    done = here(*to, tmp_path / "peft")
    if done.returncode:
        assert "transformers" in done.stderr or "PEFT" in done.stderr
        print(model_type, "PEFT refused:", done.stderr)
    else:
        pairs["PEFT"] = model, str(tmp_path / "peft")
    try:
        with fused_model(bundle, adapters) as fused:
            write_checkpoint(fused, tmp_path / "fused", "float32", 1 << 40, False, silent)
        pairs["fused"] = tmp_path / "fused", "-"
    except (BundleError, UsageError) as problem:
        assert model_type in ALONE and "transformers" in str(problem)
        print(model_type, "fused refused:", problem)
    ours = engine_logits(bundle, adapters, tokens)
    assert apart(ours, engine_logits(bundle, None, tokens)) > 0.01
    for name, theirs in several_peft_logits(pairs, tokens.tolist(), tmp_path).items():
        print(model_type, name, error := apart(ours, theirs))
        assert error <= CLOSE_ELSEWHERE
