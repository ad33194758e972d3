"""The first values of a prefix: keys and values that the model itself gives to random tokens.

MeZO's appendix E.5 finds this important (real activation initialization): of m random tokens, run
through the model once, each layer's prefix begins as its keys and values. They lie behind the
rotary embedding at positions 0 to m-1, and are rotated no further.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np

from runtime.arrays.stored import Block
from runtime.arrays.values import InputObserver, Lora, Loras
from runtime.core.errors import DivergedError, UsageError
from runtime.engine.visits import visit, visits
from runtime.methods.adapters import Adapters
from runtime.methods.noise import key_of
from runtime.methods.protocol import Models


def fill_prefix(models: Models, adapters: Adapters, seed: int, most: int) -> None:
    """Replace every prefix by the keys and values of random tokens, drawn by the seed.

    `most` is the length of the longest row that the plan is for, which the rows must not exceed.

    Raises:
        UsageError: the prefix has more rows than that.
        DivergedError: the model's keys or values are not finite.
    """
    manifest = adapters.manifest
    rows = manifest.lora.prefix
    if rows > most:
        raise UsageError(
            f"--prefix-length {rows} is too long for sequences of {most} tokens, as which its "
            "first keys and values are computed; give less, or a larger --max-seq-length"
        )
    drawn = mx.random.uniform(shape=(rows,), key=key_of(seed, "prefix"), stream=mx.cpu)
    tokens = np.array(drawn * manifest.vocab_size).astype(np.int64)
    tokens = np.minimum(tokens, manifest.vocab_size - 1)
    model = models(rows)
    with visit(model, 0):
        x = model.embed(tokens)
    for layer in visits(model):
        x = model.forward(layer.block, x, _watching(adapters, layer.block))


def _watching(adapters: Adapters, block: Block) -> Loras:
    """Adapters of a block that let it run without a prefix, and take its keys and values."""
    manifest = adapters.manifest
    loras: Loras = {}
    for name in manifest.adapted(block):
        pair = manifest.adapter_names(block, name)
        keys, values = (Adapters.shapes(manifest)[full] for full in pair)

        def take(seen: mx.array, pair: tuple[str, str] = pair, width: int = keys[1]) -> None:
            for full, part in zip(pair, (seen[:, :width], seen[:, width:]), strict=True):
                value = mx.contiguous(part)
                mx.eval(value)
                if not mx.isfinite(value).all().item():
                    raise DivergedError(
                        f"the model's own {full} are not finite before training: the bundle's "
                        "weights are damaged; export the model again"
                    )
                adapters.tensors[full] = value

        none = Lora(mx.zeros((0, keys[1])), mx.zeros((0, values[1])), 1.0)
        loras[name] = replace(none, observer=InputObserver(take, keys[0]))
    return loras
