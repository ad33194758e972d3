"""Zeroth-order methods as a run starts them, for tests: options of each, rows, and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from runtime.bundle.store import Bundle
from runtime.config.train import TrainConfig
from runtime.engine.model import Model
from runtime.engine.sample import Row
from runtime.methods.adapters import Adapters
from runtime.methods.noise import Noise
from runtime.methods.protocol import Start
from runtime.methods.protocol import method as implementation
from runtime.methods.protocol import started as start
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.parallel.workers import Workers
from runtime.storage.activations import Activations
from support.models import row_of

Rng = np.random.Generator


AVERAGED = {"method": "mezo", "queries": 2, "zo_window": 4}
OPTIONS: dict[str, dict[str, Any]] = {  # of the command line, by name of a case
    "fzoo": {"queries": 4},
    "kzoo": {"seed_pool": 16},
    "one-point": {"queries": 2},
    "hizoo": {"queries": 2, "hessian_smoothing": 1e-3},
    "zo-act": {"queries": 2},
    "momentum": {**AVERAGED, "zo_optimizer": "momentum"},
    "adam": {**AVERAGED, "zo_optimizer": "adam"},
    "parameter-norm": {
        **{"method": "mezo", "queries": 2},
        **{"zo_scaling": "parameter-norm", "zo_scaling_interval": 2},
    },
    "gradient-norm": {
        **{"method": "mezo", "queries": 2},
        **{"zo_scaling": "gradient-norm", "zo_scaled": "expectation"},
    },
}


def config_of(case: str, seed: int, **more: Any) -> TrainConfig:
    options = {"method": case, "seed": seed, **OPTIONS.get(case, {}), **more}
    return TrainConfig(bundle="a bundle", data="random:0", **options)


def mezo_of(
    model: Model,
    adapters: Adapters,
    folder: Path,
    seed: int | Noise,
    rows: int,
    queries: int = 1,
    epsilon: float = 1e-3,
    **more: Any,
) -> ZerothOrder:
    """MeZO on a model, for steps of so many rows."""
    shape = (1, model.bucket, model.bundle.manifest.widest)
    scratch = Activations(folder, 1, 2 * queries * rows, shape)
    noise = seed if isinstance(seed, Noise) else Noise(seed)
    point = TwoPoint(queries)
    return ZerothOrder(lambda length: model, adapters, scratch, noise, epsilon, point, **more)


class ListedRows:
    """Rows in a list."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return self.rows[index].tokens, self.rows[index].scored


def started(
    config: TrainConfig,
    model: Model,
    adapters: Adapters,
    folder: Path,
    rows: int,
    lanes: int,
    fresh: bool = True,
    workers: Workers | None = None,
) -> ZerothOrder:
    """The method as a run starts it, but for the plan."""
    config = TrainConfig(**{**vars(config), "batch_size": rows})
    demand = implementation(config.method).demand(config)
    plan: Any = SimpleNamespace(
        bucket=model.bucket, lanes=min(lanes, demand.lanes[0]), compute_dtype="float32"
    )
    begin = Start(
        lambda length: model,
        plan,
        adapters,
        folder,
        model.weights,
        rows=ListedRows(rows_of(model.bundle, np.random.default_rng(config.seed), 5)),
        fresh=fresh,
        workers=workers or Workers(),
    )
    found = start(config, begin)
    assert isinstance(found, ZerothOrder)
    return found


def perturbed(method: ZerothOrder, adapters: Adapters, by: float) -> Adapters:
    """Adapters of the whole model, moved so far along the first direction of the first step."""
    moved = {
        name: value + method.noise.draw(0, 0, name, value.shape) * by
        for name, value in adapters.tensors.items()
    }
    return Adapters(adapters.manifest, moved)


def copy_of(adapters: Adapters) -> Adapters:
    return Adapters(adapters.manifest, dict(adapters.tensors))


def rows_of(bundle: Bundle, rng: Rng, count: int) -> list[Row]:
    return [row_of(bundle, rng, int(rng.integers(3, 16))) for _ in range(count)]


def same(a: Adapters, b: Adapters) -> None:
    for name, expected in a.tensors.items():
        assert mx.array_equal(b.tensors[name], expected), name
