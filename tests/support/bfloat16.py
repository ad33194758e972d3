"""Whether this machine multiplies bfloat16, and models whose products are so rounded elsewhere."""

from __future__ import annotations

import pytest
from oracles.bfloat16 import RoundedProducts

from runtime.arrays.arrays import Arrays
from runtime.arrays.products import Products
from runtime.core.errors import UsageError
from runtime.engine import model
from runtime.machine import backend, machine_code
from runtime.machine.backend import load_onednn
from runtime.machine.onednn import OneDnn
from runtime.run import session


def require_onednn() -> OneDnn:
    """oneDNN; the test is skipped where it is not installed, or does not multiply bfloat16."""
    try:
        return load_onednn()
    except UsageError as reason:
        pytest.skip(str(reason))


def with_rounded_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models of this process that compute in bfloat16 multiply by the oracle."""
    original = model.products_for

    def products_for(compute_dtype: str, arrays: Arrays, library: OneDnn | None) -> Products:
        if compute_dtype == "bfloat16":
            return RoundedProducts(arrays)
        return original(compute_dtype, arrays, library)

    monkeypatch.setattr(model, "products_for", products_for)
    monkeypatch.setattr(machine_code, "lacking", lambda: "its tiles are bits for oneDNN")
    for module in (backend, model, session):
        monkeypatch.setattr(module, "load_onednn", lambda *_: None)
