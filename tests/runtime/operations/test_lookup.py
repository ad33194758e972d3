"""What layers are given besides a hidden state: rows of tables, and keys of earlier layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from oracles import whole_model as reference
from support.bundles import Rng, Tiny, settings, with_operations
from support.generation import dense_logits
from support.models import adapters_of, agree, check_gradients, mebp, model_of, packed_of, rows_of

from export.bundle import export_bundle
from runtime.arrays.stored import Matrix
from runtime.arrays.weight_source import Tile
from runtime.bundle.checks import check_manifest
from runtime.bundle.manifest import Manifest, block_range, dense_range
from runtime.core.errors import BundleError, UsageError
from runtime.engine.graphs import Graphs
from runtime.engine.model import Model
from runtime.operations.attention import Attention
from runtime.operations.embedding import Lookup
from runtime.operations.linear import Linear
from runtime.plan.lower import Sizes, lower
from runtime.run.budget import plan_decoding
from runtime.run.decoder import Decoder
from runtime.run.session import open_session
from runtime.storage.weights import Weights

FAMILY = "gemma4"
OWNER, READER = "model.layers.1", "model.layers.3"  # of keys and values without a window


def lookups(manifest: Manifest) -> list[Lookup]:
    operations = manifest.block_types["layer0"].operations
    return [one for one in operations if isinstance(one, Lookup)]


@pytest.mark.parametrize("kept", [0, 2])
def test_gradients_reach_the_layers_whose_keys_others_share(
    tiny: Tiny, rng: Rng, tmp_path: Path, kept: int
) -> None:
    """Rows longer than the window, and packed rows; autograd is over the whole model."""
    bundle = tiny(FAMILY)
    adapters, rows = adapters_of(bundle, rng), rows_of(bundle, rng)
    dense = reference.dense_model(bundle, adapters)
    check_gradients(dense, model_of(bundle, 32), adapters, rows, tmp_path, kept)
    packed = packed_of(bundle, rng, 60, 30)
    _, found = mebp(model_of(bundle, 64, slices=True), adapters, [packed], tmp_path, kept)
    agree(found, reference.packed_gradients(dense, packed)[1])


def test_tables_are_read_by_rows_and_their_products_have_no_adapters(tiny: Tiny, rng: Rng) -> None:
    bundle = tiny(FAMILY)
    manifest, read = bundle.manifest, set()

    class Watched(Weights):
        def tile(self, matrix: Matrix, start: int, stop: int) -> Tile:
            read.add(matrix.packed.offset)
            return super().tile(matrix, start, stop)

    model = model_of(bundle, 32, weights=Watched(bundle))
    x = model.embed(rng.integers(0, 320, 32))
    whole, own = lookups(manifest)
    assert (whole.matrix, whole.owned, own.owned) == ("model.embed_tokens", False, True)
    for block in manifest.layers:
        x = model.forward(block, x, {})
        (table,) = own.matrices(block.tensor)
        offset = manifest.matrices[table].packed.offset
        start, stop = dense_range(manifest, block)
        assert offset not in read and start < stop == offset < block_range(manifest, block)[1]
    frozen = [
        name
        for one in manifest.block_types["layer0"].operations
        if isinstance(one, Linear) and one.frozen
        for name in one.matrices(str)
    ]
    assert frozen == ["per_layer_model_projection"]
    assert not {*frozen, own.matrix} & {*manifest.linear_names}


@pytest.mark.parametrize("number", [-1.0, 320.0, float("nan")])
def test_numbers_without_a_row_are_refused(tiny: Tiny, number: float) -> None:
    bundle = tiny(FAMILY)
    model, block = model_of(bundle, 16), bundle.manifest.layers[0]
    x = model.embed(np.zeros(16, np.int64))
    x[..., bundle.manifest.hidden_size] = number
    with pytest.raises(BundleError, match="does not have"):
        model.forward(block, x, {})


def test_layers_without_a_window_share_one_cache(tiny: Tiny) -> None:
    bundle = tiny(FAMILY)
    lowered = lower(bundle.manifest, 1, Sizes(10_000, 16), packed=False, context=100)
    cache = Model(bundle, Weights(bundle), lowered, Graphs(bundle)).new_cache()
    named = {block.name: values for block, values in cache.items()}
    assert all(named[READER][name] is named[OWNER][name] for name in named[OWNER])
    bytes_held = sum(array.nbytes for values in named.values() for array in values.values())
    shared = sum(array.nbytes for array in named[READER].values())
    assert shared and lowered.cached_bytes == bytes_held - shared


def test_tables_are_not_trained_whole(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="embed_tokens_per_layer"):
        export_bundle(settings("random:tiny-gemma4", tmp_path / "full", trainable="full"))
    assert tiny(FAMILY).manifest.table_names == ("embed_tokens_per_layer",)


def test_a_sequence_is_decoded_with_the_shared_cache(tiny: Tiny, rng: Rng) -> None:
    """In parts of several chunks, and of one token; beyond the window."""
    bundle = tiny(FAMILY)
    adapters = adapters_of(bundle, rng)
    tokens = rng.integers(0, 320, 60).tolist()
    decoder = Decoder(open_session(bundle, plan_decoding(bundle, 4 * 10**9, 100)), adapters)
    found = [decoder.read(part) for part in (tokens[:50], tokens[50:51], tokens[51:])]
    expected = dense_logits(bundle, adapters, tokens)[[49, 50, 59]]
    for logits, others in zip(found, expected, strict=True):
        assert np.abs(logits - others).max() <= 1e-5 * np.abs(others).max()


@pytest.mark.parametrize(
    ("of", "changes", "message"),
    [
        (Lookup, {"matrix": "mlp.up_proj", "owned": True}, "for rows of"),
        (Attention, {"cache_of": "model.layers.0"}, "no such keys"),  # which has a window
        (Attention, {"cache_of": READER}, "no such keys"),  # itself
        (Attention, {"cache_of": "elsewhere"}, "no such keys"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(
    tiny: Tiny, of: type, changes: dict[str, Any], message: str
) -> None:
    manifest = tiny(FAMILY).manifest
    check_manifest(manifest)
    with pytest.raises(BundleError, match=message):
        check_manifest(with_operations(manifest, manifest.layers[-1].type, of, **changes))


def test_a_block_takes_what_the_one_before_returns(tiny: Tiny) -> None:
    manifest = tiny(FAMILY).manifest
    first, second, *others = manifest.blocks[1:-1]
    swapped = (manifest.blocks[0], second, first, *others, manifest.blocks[-1])
    with pytest.raises(BundleError, match="is given"):
        check_manifest(replace(manifest, blocks=swapped))
    assert manifest.widest == 128 + 1 + 2 * 64 + 2 * 128
