"""Noise of rows: the same in any order, of the stated distribution."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from support.bundles import Rng

from runtime.methods.full.row_noise import DRAWS, RowNoise, rows_of_noise
from runtime.methods.full.stored_floats import expand, rounded
from runtime.methods.noise import Noise


@pytest.mark.parametrize("kind", sorted(DRAWS))
@pytest.mark.parametrize("columns", [640, 1009, 200_000])
def test_any_rows_are_those_of_the_whole(rng: Rng, seed: int, kind: str, columns: int) -> None:
    rows = 3 * rows_of_noise(columns) + 5
    whole = np.empty((rows, columns), np.float32)
    RowNoise(Noise(seed, kind)).draw(4, 1, "w", 0, whole)
    for _ in range(5):
        start = int(rng.integers(rows))
        part = np.empty((int(rng.integers(1, rows - start + 1)), columns), np.float32)
        RowNoise(Noise(seed, kind)).draw(4, 1, "w", start, part)
        assert (part == whole[start : start + len(part)]).all()
    chosen = rng.integers(0, rows, 4)
    part = np.empty((4, columns), np.float32)
    RowNoise(Noise(seed, kind)).draw_rows(4, 1, "w", chosen, part)
    assert (part == whole[chosen]).all()


@pytest.mark.parametrize("kind", sorted(DRAWS))
def test_directions_differ_and_have_mean_0_and_variance_1(seed: int, kind: str) -> None:
    noise = RowNoise(Noise(seed, kind))
    found = []
    for step, query, tensor in ((0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")):
        z = np.empty((300, 1000), np.float32)
        noise.draw(step, query, tensor, 0, z)
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs((z.astype(np.float64) ** 2).mean() - 1) < 8 / np.sqrt(z.size)
        found.append(z.reshape(-1))
    products = np.corrcoef(found) - np.eye(4)
    assert np.abs(products).max() < 5 / np.sqrt(found[0].size)


def test_gaussian_noise_has_the_quantiles_of_the_normal_distribution(seed: int) -> None:
    z = np.empty((1000, 1000), np.float32)
    RowNoise(Noise(seed)).draw(0, 0, "w", 0, z)
    for share in (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        expected = NormalDist().inv_cdf(share)
        error = np.sqrt(share * (1 - share) / z.size) / NormalDist().pdf(expected)
        assert abs(np.quantile(z, share) - expected) < 6 * error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding_is_right_on_average(rng: Rng, seed: int, dtype: str) -> None:
    values = np.repeat(rng.standard_normal((1, 50)).astype(np.float32), 20_000, axis=0)
    integers = RowNoise(Noise(seed)).integers(0, "w", np.arange(len(values)), 50)
    found = np.empty_like(values)
    expand(rounded(values, dtype, integers), dtype, found)
    step = np.abs(values[0]) * (2.0**-7 if dtype == "bfloat16" else 2.0**-10)
    assert (np.abs(found - values) <= step).all()
    assert len(np.unique(found[:, 0])) == 2
    assert (np.abs(found.astype(np.float64).mean(axis=0) - values[0]) < step * 0.03).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_values_are_kept(rng: Rng, seed: int, dtype: str) -> None:
    values = rng.standard_normal((30, 7)).astype(np.float32)
    integers = RowNoise(Noise(seed)).integers(0, "w", np.arange(30), 7)
    once, twice = np.empty_like(values), np.empty_like(values)
    stored = rounded(values, dtype, integers)
    expand(stored, dtype, once)
    expand(rounded(once, dtype, integers[::-1]), dtype, twice)
    assert (once == twice).all()
    assert (rounded(once, dtype) == stored).all()
    assert np.abs(once - values).max() <= (0 if dtype == "float32" else 2.0**-8) * 4
