"""A bundle with an adapter, by rows: the values of MLX's dequantization and a plain product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.files import listing
from support.fusing import added, dense, fused_model
from support.models import FAMILIES, Rng, Tiny, adapters_of

from export.fused.bundle import write_bundle
from export.fused.model import FusedCheckpoint, LowRank
from runtime.core.errors import BundleError


@pytest.mark.parametrize(
    ("family", "layouts"), [*((one, "mixed") for one in FAMILIES), ("qwen2", "bfloat16")]
)
def test_rows_are_the_weights_and_what_the_adapter_adds(
    tiny: Tiny, rng: Rng, family: str, layouts: str
) -> None:
    bundle = tiny(family, layouts)
    adapters = adapters_of(bundle, rng)
    with fused_model(bundle, adapters) as model:
        assert set(model.names()) == {
            *(f"{name}.weight" for name in bundle.manifest.matrices),
            *bundle.manifest.vectors,
        }
        for name in bundle.manifest.matrices:
            rows, columns = model.shape(f"{name}.weight")
            start, stop = sorted(map(int, rng.integers(0, rows + 1, 2)))
            found = model.rows(f"{name}.weight", start, stop)
            assert found.shape == (stop - start, columns) and found.dtype == np.float32
            expected = dense(bundle, adapters, name)
            np.testing.assert_allclose(
                found, expected[start:stop], rtol=0, atol=2e-6 * np.abs(expected).max()
            )


def test_only_matrices_without_an_adapter_keep_their_integers(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("qwen2")
    adapters = adapters_of(bundle, rng)
    part = dict(list(added(adapters).items())[:3])
    with FusedCheckpoint(bundle, part) as model:
        _, kept = model.stored()
        assert kept == set(bundle.manifest.matrices) - set(part)
        for name in kept:
            packing = model.quantized_form(f"{name}.weight")
            assert packing is not None
            packed = model.quantized_rows(f"{name}.weight", 3, 9).values(packing)
            np.testing.assert_array_equal(packed, model.rows(f"{name}.weight", 3, 9))
        with pytest.raises(BundleError, match="not quantized"):
            model.quantized_rows(f"{next(iter(part))}.weight", 0, 1)


def test_what_does_not_fit_is_refused(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny("qwen2")
    name, one = next(iter(added(adapters_of(bundle, rng)).items()))
    for wrong in (
        {"model.nothing": one},
        {name: LowRank(one.a[:-1], one.b, one.scale)},
        {name: LowRank(one.a[:, :-1], one.b, one.scale)},
    ):
        with pytest.raises(ValueError, match="what is added"):
            FusedCheckpoint(bundle, wrong)


@pytest.mark.filterwarnings("error")
def test_an_adapter_that_has_diverged_is_named(tiny: Tiny, rng: Rng, tmp_path: Path) -> None:
    bundle = tiny("qwen2")
    name, one = next(iter(added(adapters_of(bundle, rng)).items()))

    def grown(value: float) -> FusedCheckpoint:
        a, b = np.full_like(one.a, value), np.full_like(one.b, value)
        return FusedCheckpoint(bundle, {name: LowRank(a, b, 2.0)})

    with grown(1e30) as model, pytest.raises(BundleError, match="adapter is damaged, or has div"):
        model.rows(f"{name}.weight", 0, 4)
    with (
        grown(1e6) as model,
        pytest.raises(BundleError, match="too large for float16 scales: the adapter is damaged"),
    ):
        write_bundle(model, tmp_path / "out", None, False, lambda _: None, lambda *_: None)
    assert listing(tmp_path) == []


def test_a_configuration_of_another_model_is_refused(tiny: Tiny) -> None:
    bundle = tiny("qwen2")
    config = bundle.manifest.config
    for change, said in (
        ({"num_hidden_layers": 3}, "2 layers, its configuration says 3"),
        ({"intermediate_size": 64}, "wrong shape"),
        ({"num_attention_heads": "many"}, "cannot be built"),
    ):
        manifest = msgspec.structs.replace(bundle.manifest, config={**config, **change})
        with pytest.raises(BundleError, match=said):
            FusedCheckpoint(replace(bundle, manifest=manifest), {})
    manifest = msgspec.structs.replace(bundle.manifest, family="../other")
    with pytest.raises(BundleError, match="not supported"):
        FusedCheckpoint(replace(bundle, manifest=manifest), {})


def test_settings_that_a_configuration_leaves_out_are_those_of_mlx_lm(tiny: Tiny) -> None:
    bundle = tiny("qwen2")
    config = {key: one for key, one in bundle.manifest.config.items() if key != "rope_theta"}
    manifest = msgspec.structs.replace(bundle.manifest, config=config)
    with FusedCheckpoint(replace(bundle, manifest=manifest), {}) as model:
        assert model.config["rope_theta"] == 1e6
