"""Adapters for tests, written by `ondevice adapter` as other tools read them, and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters
from runtime.run.lora import to_apply
from support.lora import with_lora
from support.models import adapters_of
from support.runs import here

Rng = np.random.Generator
SOME = {"rank": 3, "alpha": 5.0, "targets": ("q_proj", "k_proj", "down_proj"), "layers": 1}


def saved_adapter(
    bundle: Bundle, rng: Rng, folder: Path, size: float = 0.05, **lora: object
) -> Adapters:
    """Random adapters of these settings, B of this size, in a folder as ours."""
    adapters = adapters_of(with_lora(bundle, **lora), rng, size)
    folder.mkdir()
    adapters.save(folder)
    return adapters


def written(bundle: Bundle, source: Path, form: str, output: Path, *more: object) -> Path:
    """What the command writes."""
    words = ("adapter", source, "--bundle", bundle.path, "--to", form, "-o", output, *more)
    done = here(*words)
    assert done.returncode == 0, done.stderr
    return output


def read_again(bundle: Bundle, source: Path) -> Adapters:
    """What `--adapter SOURCE` applies."""
    return Adapters.load(to_apply(source, bundle).manifest, source)


def check_same(found: Adapters, expected: Adapters) -> None:
    """Compare values bit for bit, and settings as far as they matter to the model."""
    assert set(found.tensors) == set(expected.tensors)
    for name, value in expected.tensors.items():
        assert np.array_equal(np.array(found.tensors[name]), np.array(value)), name
    ours, theirs = expected.manifest, found.manifest
    assert found.shapes(theirs) == expected.shapes(ours)
    assert np.isclose(theirs.lora.scale, ours.lora.scale, rtol=1e-12)
    assert theirs.lora.dropout == ours.lora.dropout
