"""How long `ondevice doctor --bench` takes, from the rate at which this machine multiplies."""

from __future__ import annotations

from collections.abc import Sequence

from export.sources.random import PRESETS
from harness.bench.doctor import MODELS, TOKENS
from harness.doctor.computing import PRODUCTS
from harness.doctor.finding import Finding
from ondevice.config.bench import BenchConfig
from ondevice.units import format_seconds

# A step of MeBP multiplies each weight four times with each token (forward, recomputed forward, and
# twice backward), a step of MeZO twice. Under the smallest budget it takes about three times as
# long as the products alone, and half the time of training goes into other things.
PRODUCTS_OF_STEPS = (4 + 2) * 2
SLOWER = 1 + 3
EXPORT_WEIGHTS_PER_S = 5e6  # drawn, quantized and written, on one core
START_S = 4.0  # of each process


def describe_duration(config: BenchConfig, found: Sequence[Finding]) -> str:
    """A sentence to say before it begins."""
    speeds = next((one.facts["speeds"] for one in found if "speeds" in one.facts), None)
    rate = 1e9 * speeds[PRODUCTS] if speeds else 50e9
    names = config.model_names or MODELS
    seconds = sum(
        _seconds(_weights(name), length, rate, config.steps)
        for name in names
        for length in config.lengths or (TOKENS,)
        if name in PRESETS
    )
    return (
        f"measuring {', '.join(names)} with random weights: about {format_seconds(seconds)}, most "
        "of it for the bundles if they are not there yet; Ctrl-C keeps finished rows"
    )


def _seconds(weights: int, tokens: int, rate: float, steps: int) -> float:
    products = 2.0 * weights * tokens / rate
    training = steps * PRODUCTS_OF_STEPS / 2 * products * SLOWER
    return weights / EXPORT_WEIGHTS_PER_S + training + 4 * START_S


def _weights(name: str) -> int:
    """The weights of a preset, about: of its matrices."""
    one = PRESETS[name]
    hidden, heads = one["hidden_size"], one["num_attention_heads"]
    head = one.get("head_dim", hidden // heads)
    attention = 2 * hidden * head * (heads + one["num_key_value_heads"])
    layer = attention + 3 * hidden * one["intermediate_size"]
    found: int = one["num_hidden_layers"] * layer + one["vocab_size"] * hidden
    return found
