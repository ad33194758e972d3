"""Tiny bundles, exported once, and fresh random inputs whose seed a failing test prints."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from runtime.system.backend import prepare

prepare()  # before MLX is imported

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from support.bundles import settings  # noqa: E402
from support.checkpoints import weights_of, write_folder  # noqa: E402
from support.models import BUCKETS  # noqa: E402

from export.pack import export_bundle  # noqa: E402
from ondevice.bundle.store import Bundle  # noqa: E402
from ondevice.config.export import ExportConfig  # noqa: E402

SEED = "ONDEVICE_TEST_SEED"  # repeats a failed run


@pytest.fixture
def seed() -> int:
    """A seed of its own for every test and run; pytest shows it where the test fails."""
    value = int(os.environ[SEED]) if SEED in os.environ else secrets.randbits(32)
    print(f"{SEED}={value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """tiny(family, **settings): its bundle at BUCKETS, exported when first asked for."""
    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, Bundle] = {}

    def get(family: str, **settings: object) -> Bundle:
        key = repr((family, sorted(settings.items())))
        if key not in made:
            config = {"seq_lens": BUCKETS, "device": "cpu", **settings}
            source, output = f"random:tiny-{family}", str(folder / f"{family}-{len(made)}")
            made[key] = export_bundle(ExportConfig(source=source, output=output, **config))
        return made[key]

    return get


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with one bucket, small enough to be copied often."""
    folder = tmp_path_factory.mktemp("origin")
    checkpoint = write_folder(folder / "checkpoint", *weights_of("tiny-qwen2"))
    (checkpoint / "tokenizer.json").write_text('{"not": "used here"}')
    return export_bundle(settings(checkpoint, folder / "bundle"))
