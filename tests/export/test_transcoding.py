"""Quantized sources: what a bundle holds of them, whole or requantized."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import mlx.core as mx
import numpy as np
import pytest
from support.bundles import Rng, settings
from support.checkpoints import Arrays, quantized, weights_of, write_folder
from support.gguf_files import QUANTIZED, Blocks, random_blocks, write_gguf

from export.bundle import export_bundle
from export.sources.families import expected_shapes
from export.sources.gguf_file import GGUFFile
from export.sources.open import open_checkpoint
from export.stored import QuantizedForm, QuantizedRows
from runtime.arrays.stored import Extent
from runtime.bundle.store import WEIGHTS, Bundle, open_bundle
from runtime.core.errors import BundleError, StorageError, UsageError

# K types need rows of 256
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
ROUNDED = {"Q2_K", "Q4_K", "Q5_K", "Q6_K"}


class Source(NamedTuple):
    """A GGUF file and the blocks that its matrices were written from, in the model's row order."""

    path: Path
    blocks: dict[str, Blocks]


def source_of(rng: Rng, folder: Path, preset: str, floats: tuple[str, ...] = ()) -> Source:
    """Matrices of every quantized type in turn; those named in `floats` are float16."""
    config, arrays = weights_of(f"tiny-{preset}")
    config |= WIDE
    arrays = {
        name: np.resize(arrays[name], shape)
        for name, shape in expected_shapes(config["model_type"], config).items()
    }
    blocks: dict[str, Blocks] = {}
    names = [name for name, array in arrays.items() if array.ndim == 2]
    for name in names:
        if not name.startswith(floats or ("-",)):
            type_ = QUANTIZED[len(blocks) % len(QUANTIZED)]
            blocks[name] = random_blocks(rng, type_, *arrays[name].shape)
    assert len({one.type for one in blocks.values()}) == len(QUANTIZED)
    return Source(write_gguf(folder / "m.gguf", config, arrays, blocks=blocks), blocks)


def part(bundle: Bundle, extent: Extent) -> np.ndarray:
    dtype = np.dtype(extent.dtype)
    data = np.memmap(bundle.path / WEIGHTS, np.uint8, "r")[extent.offset :][: extent.nbytes]
    return np.array(data).view(dtype).reshape(extent.shape)


def values_of(bundle: Bundle, name: str, rows: slice = slice(None)) -> np.ndarray:
    """What a bundle's matrix, or rows of it, stands for, by the words of its format."""
    matrix = bundle.manifest.matrices[name]
    scales = part(bundle, matrix.scales)[rows]
    biases = None if matrix.biases is None else part(bundle, matrix.biases)[rows]
    form = QuantizedForm(
        matrix.bits,
        matrix.group_size,
        matrix.layout,
        "float16" if scales.dtype == np.float16 else "float32",
    )
    return QuantizedRows(part(bundle, matrix.packed)[rows], scales, biases).values(form)


def stored_name(name: str) -> str:
    """llama.cpp's name of one of Gemma 3's matrices."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    found = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "preset", ["llama", "gemma3", pytest.param("qwen2", marks=pytest.mark.slow)]
)
def test_a_gguf_keeps_its_values(rng: Rng, tmp_path: Path, preset: str) -> None:
    source = source_of(rng, tmp_path, preset)
    bundle = export_bundle(settings(source.path, tmp_path / "bundle"))
    bundle.verify()
    assert len(bundle.manifest.matrices) == len(source.blocks)
    for name, blocks in source.blocks.items():
        matrix = bundle.manifest.matrices[name.removesuffix(".weight")]
        found, expected = values_of(bundle, name.removesuffix(".weight")), blocks.values
        if blocks.type.name not in ROUNDED:
            np.testing.assert_array_equal(found, expected)
            assert matrix.error == {}
            continue
        error = np.square(found - expected, dtype=np.float64).sum()
        size = np.square(expected, dtype=np.float64).sum()
        assert 0 < matrix.error["relative_rms"] < 8e-3
        assert matrix.error["relative_rms"] == pytest.approx(np.sqrt(error / size), rel=1e-6)
        assert matrix.error["max"] == np.abs(found - expected).max()
    kept = bundle.manifest.provenance["transcoded"]
    assert sum(kept.values()) == len(source.blocks)
    assert kept["4 bits, affine groups of 32, float16 scales"] > 0


def test_what_a_gguf_holds_as_floats_is_quantized(rng: Rng, tmp_path: Path) -> None:
    source = source_of(rng, tmp_path, "llama", ("model.embed_tokens", "model.layers.0.mlp"))
    bundle = export_bundle(settings(source.path, tmp_path / "bundle"))
    with open_checkpoint(str(source.path)) as read:
        for name, matrix in bundle.manifest.matrices.items():
            tensor = f"{name}.weight"
            if tensor in source.blocks:
                assert matrix.group_size in (32, 128)
                continue
            assert read.quantized_form(tensor) is None
            with pytest.raises(BundleError, match="is not quantized"):
                read.quantized_rows(tensor, 0, 1)
            bits = 8 if name.endswith(("k_proj", "v_proj")) else 4
            assert (matrix.bits, matrix.group_size) == (bits, 64)
            low, high = {4: (0.03, 0.12), 8: (0.002, 0.01)}[bits]
            assert low < matrix.error["relative_rms"] < high


@pytest.mark.parametrize(
    ("more", "linear", "embedding"),
    [
        ({"bits": 8}, (8, 64), (8, 64)),
        ({"embedding_bits": 4, "group_size": 128}, None, (4, 128)),
        (
            {"bits": 4, "embedding_bits": 8, "group_size": 32, "eight_bit": "none"},
            (4, 32),
            (8, 32),
        ),
    ],
)
def test_bits_that_are_asked_for_requantize(
    rng: Rng,
    tmp_path: Path,
    more: dict[str, Any],
    linear: tuple[int, int] | None,
    embedding: tuple[int, int] | None,
) -> None:
    source = source_of(rng, tmp_path, "qwen2")
    bundle = export_bundle(settings(source.path, tmp_path / "bundle", **more))
    with open_checkpoint(str(source.path)) as read:
        for name, matrix in bundle.manifest.matrices.items():
            wanted = linear if ".layers." in name else embedding
            kept = read.quantized_form(f"{name}.weight")
            assert kept is not None
            found = (matrix.bits, matrix.group_size)
            assert found == (wanted or (kept.bits, kept.group_size))
            assert wanted is None or matrix.layout == {4: "affine", 8: "symmetric"}[matrix.bits]
            if wanted is not None:
                expected = source.blocks[f"{name}.weight"].values
                error = np.abs(values_of(bundle, name) - expected).max()
                assert matrix.error.get("max", 0.0) == pytest.approx(error, rel=1e-5)


def mlx_folder(folder: Path, bits: int) -> tuple[Path, Arrays]:
    """tiny-qwen3 as MLX quantizes it, and the values of its matrices."""
    config, arrays = weights_of("tiny-qwen3")
    config["quantization"] = form = {"group_size": 64, "bits": bits}
    stored: dict[str, Any] = {}
    values: Arrays = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            stored[name] = array
            continue
        parts = quantized(name, mx.array(array), **form)
        stored |= parts
        values[name.removesuffix(".weight")] = np.array(mx.dequantize(*parts.values(), **form))
    return write_folder(folder, config, stored), values


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_an_mlx_checkpoint_keeps_its_values(tmp_path: Path, bits: int) -> None:
    folder, values = mlx_folder(tmp_path / "checkpoint", bits)
    bundle = export_bundle(settings(folder, tmp_path / "bundle"))
    bundle.verify()
    assert set(bundle.manifest.matrices) == set(values)
    for name, expected in values.items():
        matrix = bundle.manifest.matrices[name]
        assert (matrix.bits, matrix.layout) == (4 if bits <= 4 else 8, "affine")
        assert matrix.error == {}
        np.testing.assert_allclose(values_of(bundle, name), expected, rtol=1e-6, atol=1e-7)


def test_options_that_nothing_uses_are_refused_where_values_are_kept(tmp_path: Path) -> None:
    folder, _ = mlx_folder(tmp_path / "checkpoint", 4)
    given = settings(folder, tmp_path / "bundle", eight_bit="q_proj", group_size=32)
    with pytest.raises(
        UsageError, match=r"--eight-bit, --group-size: nothing is quantized.*--bits 4"
    ):
        export_bundle(given)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("more", [{}, {"bits": 8, "embedding_bits": 8}])
def test_the_space_that_is_asked_for_is_what_the_weights_take(
    rng: Rng, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    source = source_of(rng, tmp_path, "llama")
    bundle = export_bundle(settings(source.path, tmp_path / "bundle", **more))
    matrices = sum(one.nbytes for one in bundle.manifest.matrices.values())
    vectors = sum(one.nbytes for one in bundle.manifest.vectors.values())
    usage = type(shutil.disk_usage("/"))

    def export(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))
        export_bundle(settings(source.path, tmp_path / f"with {free}", **more))

    with pytest.raises(StorageError, match="are free there"):
        export(matrices + vectors - 1)
    export(matrices + vectors)


@pytest.mark.slow
@pytest.mark.real
def test_the_real_gguf_keeps_its_values(
    real_gguf: Path, real_bundle: Path, rng: np.random.Generator
) -> None:
    """The relative error of each matrix of Gemma 3 270M, by its type in the file.

    Of a large matrix, in an eighth of its slices.
    """
    bundle = open_bundle(real_bundle)
    worst: dict[str, float] = {}
    file = GGUFFile(real_gguf)
    with open_checkpoint(str(real_gguf)) as read:
        for name, matrix in bundle.manifest.matrices.items():
            tensor = f"{name}.weight"
            squares = errors = 0.0
            starts = np.arange(0, matrix.rows, 8192)
            for start in map(int, rng.permutation(starts)[: max(1, len(starts) // 8)]):
                end = min(start + 8192, matrix.rows)
                expected = read.rows(tensor, start, end)
                difference = values_of(bundle, name, slice(start, end)) - expected
                squares += float(np.square(expected, dtype=np.float64).sum())
                errors += float(np.square(difference, dtype=np.float64).sum())
            type_ = file.tensors[stored_name(name)].type.name
            worst[type_] = max(worst.get(type_, 0), np.sqrt(errors / squares))
    assert set(worst) == {"Q5_0", "Q8_0", "Q4_K", "Q6_K"}
    assert worst["Q5_0"] == worst["Q8_0"] == 0
    assert 6e-4 < worst["Q4_K"] < 7.5e-4
    assert 3e-3 < worst["Q6_K"] < 4.5e-3
    assert bundle.manifest.weights_nbytes < 276e6
