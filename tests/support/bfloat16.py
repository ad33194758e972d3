"""Whether this machine multiplies bfloat16, and models whose products are so rounded elsewhere."""

from __future__ import annotations

import pytest
from oracles.bfloat16 import RoundedProducts

from runtime.arrays.arrays import Arrays
from runtime.arrays.products import Products
from runtime.arrays.stored import Matrix
from runtime.arrays.tile_products import ReadyTile
from runtime.arrays.weight_source import Tile
from runtime.engine import model
from runtime.machine import compute_dtype, machine_code
from runtime.run import budget


def require_bfloat16() -> None:
    """The test is skipped where the processor or its compiled code does not multiply bfloat16."""
    if reason := compute_dtype.lacking():
        pytest.skip(reason)


def with_rounded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models of this process that compute in bfloat16 multiply by the oracle."""
    original, ready = model.products_for, ReadyTile.of

    def products_for(dtype: str, arrays: Arrays) -> Products:
        return RoundedProducts(arrays) if dtype == "bfloat16" else original(dtype, arrays)

    def ready_tile(tile: Tile, matrix: Matrix, packed: bool, products: Products) -> ReadyTile:
        of = products.whole_tile if isinstance(products, RoundedProducts) else ready
        return of(tile, matrix, packed, products)

    monkeypatch.setattr(model, "products_for", products_for)
    monkeypatch.setattr(ReadyTile, "of", ready_tile)
    monkeypatch.setattr(machine_code, "lacking", lambda: "the oracle multiplies")
    monkeypatch.setattr(compute_dtype, "lacking", lambda: "")
    monkeypatch.setattr(budget, "uncompiled", lambda *_: "")
