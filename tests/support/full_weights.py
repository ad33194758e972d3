"""Training of all parameters: bundles, weights and the method."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.bundle.store import Bundle
from runtime.engine.model import Model
from runtime.methods.adapters import Adapters
from runtime.methods.full.row_noise import RowNoise
from runtime.methods.full.weights import FullWeights, slot_layouts
from runtime.methods.full.zeroth_order import FullZerothOrder
from runtime.methods.noise import Noise
from runtime.methods.zeroth.descent import Update
from runtime.methods.zeroth.mezo import TwoPoint
from runtime.storage.activations import Activations
from runtime.storage.slots import Slots
from runtime.storage.weights import Weights
from support.bundles import Tiny

EPSILON = 1e-3


def full(tiny: Tiny, family: str, storage: str) -> Bundle:
    """A bundle whose parameters are all trained."""
    bundle = tiny(family, trainable="full", storage=storage)
    return bundle.with_lora(msgspec.structs.replace(bundle.manifest.lora, targets=()))


def weights_of(
    bundle: Bundle,
    path: Path,
    seed: int,
    kind: str = "gaussian",
    done: int = 0,
    updates: dict[int, Update | None] | None = None,
) -> FullWeights:
    slots = Slots(path, slot_layouts(bundle.manifest), b"these")
    noise, base = RowNoise(Noise(seed, kind)), Weights(bundle)
    return FullWeights(bundle.manifest, base, slots, noise, done, updates or {})


def method_of(
    model: Model, weights: FullWeights, folder: Path, rows: int, **options: float
) -> FullZerothOrder:
    manifest = model.bundle.manifest
    queries = int(options.get("queries", 1))
    shape = (1, model.bucket, manifest.hidden_size)
    return FullZerothOrder(
        lambda length: model,
        Adapters(manifest, {}),
        Activations(folder, 1, 2 * queries * rows, shape),
        weights.noise.of,
        EPSILON,
        TwoPoint(queries),
        options.get("weight_decay", 0.0),
        lanes=int(options.get("lanes", 2)),
        weights=weights,
    )


def all_of(weights: FullWeights) -> dict[str, bytes]:
    return {
        name: weights.stored(name, 0, rows).tobytes()
        for own in weights.tensors
        for name, (rows, _, _) in own.items()
    }
