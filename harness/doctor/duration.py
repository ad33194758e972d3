"""How long `ondevice doctor --bench` takes, from the rate at which this machine multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from export.sources.random import PRESETS
from harness.bench.doctor import MODELS, TOKENS
from harness.config.bench import BenchConfig
from harness.doctor.doctor import PRODUCTS
from harness.doctor.finding import Finding
from runtime.bundle.store import MANIFEST
from runtime.core.units import format_seconds

# How often a weight is multiplied with a token in a step of MeBP and one of MeZO: layers forward,
# recomputed and twice backward, and twice forward; the head forward and backward, and twice forward
LAYERS, HEAD = 4 + 2, 2 + 2
SLOWER = 1 + 2  # than the products alone, under a large budget and under the smallest
EXPORT_WEIGHTS_PER_S = 5e6  # drawn, quantized and written, on one core
START_S = 4.0  # of each process


def describe_duration(config: BenchConfig, findings: Sequence[Finding]) -> str:
    """A sentence to say before it begins."""
    speeds = next(
        (finding.facts["speeds"] for finding in findings if "speeds" in finding.facts), None
    )
    rate = 1e9 * speeds[PRODUCTS] if speeds else 50e9
    names = config.model_names or MODELS
    known = [name for name in names if name in PRESETS]
    new = [name for name in known if not (Path(config.bundles) / name / MANIFEST).exists()]
    seconds = sum(sum(_weights(name)) / EXPORT_WEIGHTS_PER_S for name in new)
    seconds += sum(
        _seconds(name, length, rate, config.steps)
        for name in known
        for length in config.lengths or (TOKENS,)
    )
    return (
        f"measuring {', '.join(names)} with random weights: about {format_seconds(seconds)}; "
        "Ctrl-C keeps finished rows"
    )


def _seconds(name: str, tokens: int, rate: float, steps: int) -> float:
    """The time of four trainings: two methods, under two budgets."""
    layers, head = _weights(name)
    products = 2.0 * tokens * (LAYERS * layers + HEAD * head)
    return steps * SLOWER * products / rate + 4 * START_S


def _weights(name: str) -> tuple[int, int]:
    """The weights of a preset's layers, and of its head, about: of its matrices."""
    preset = PRESETS[name]
    hidden, heads = preset["hidden_size"], preset["num_attention_heads"]
    size = preset.get("head_dim", hidden // heads)
    attention = 2 * hidden * size * (heads + preset["num_key_value_heads"])
    layer = attention + 3 * hidden * preset["intermediate_size"]
    return preset["num_hidden_layers"] * layer, preset["vocab_size"] * hidden
