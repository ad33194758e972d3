"""Figures printed in papers, with the table, the device and the settings of each.

Invariant: nothing here was measured by us. Megabytes are 10^6 bytes, as phys_footprint is printed.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma3-1b", "gemma3-4b")


@dataclass(frozen=True)
class Publication:
    """Where published figures come from, and which of our methods they are compared with."""

    paper: str
    place: str
    device: str
    setting: str
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One gradient step: seconds, and the process's peak footprint in MB."""

    seconds: float
    peak_mb: float


_MEBP = (
    "Memory-Efficient Backpropagation for Fine-Tuning LLMs on Resource-Constrained Mobile Devices"
)
_IPHONE = "iPhone 15 Pro Max, 8 GB"
_BOTH = ("mebp", "mezo")
_SETTING = "batch 1, LoRA rank 8 on all linear layers, mean of 10 runs, phys_footprint"
MEBP_TABLE2 = Publication(_MEBP, "Table 2", _IPHONE, f"256 tokens, {_SETTING}", _BOTH)

TRAINABLE_MILLIONS = {
    "qwen2.5-0.5b": 4.39,
    "qwen2.5-1.5b": 9.23,
    "qwen2.5-3b": 14.97,
    "gemma3-1b": 6.52,
    "gemma3-4b": 14.90,
}

STEPS: dict[tuple[str, int, str], Step] = {  # by model, tokens and method: Tables 2 and 4
    ("qwen2.5-0.5b", 256, "mezo"): Step(2.68, 318.93),
    ("qwen2.5-0.5b", 256, "mebp"): Step(3.85, 320.17),
    ("qwen2.5-1.5b", 256, "mezo"): Step(5.47, 451.57),
    ("qwen2.5-1.5b", 256, "mebp"): Step(9.09, 460.24),
    ("qwen2.5-3b", 256, "mezo"): Step(10.28, 554.10),
    ("qwen2.5-3b", 256, "mebp"): Step(17.96, 661.78),
    ("gemma3-1b", 256, "mezo"): Step(4.88, 563.64),
    ("gemma3-1b", 256, "mebp"): Step(9.48, 569.00),
    ("gemma3-4b", 256, "mezo"): Step(16.86, 961.54),
    ("gemma3-4b", 256, "mebp"): Step(28.58, 1029.49),
    ("qwen2.5-1.5b", 128, "mezo"): Step(4.81, 367.49),
    ("qwen2.5-1.5b", 128, "mebp"): Step(6.92, 405.14),
    ("qwen2.5-1.5b", 512, "mezo"): Step(9.61, 617.82),
    ("qwen2.5-1.5b", 512, "mebp"): Step(17.14, 624.62),
    ("qwen2.5-1.5b", 1024, "mezo"): Step(18.18, 986.00),
    ("qwen2.5-1.5b", 1024, "mebp"): Step(34.40, 994.09),
}
