"""A breakdown of a run's memory: the bytes that its plan counts for each owner, and the remainder.

Invariant: the owners and the remainder sum to the measured peak. The remainder is below zero where
the plan counts more than was in use at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.bench.targets import SHARE_NOT_ACCOUNTED

OWNERS = {  # field of the plan: name in the table
    "process_bytes": "process",
    "adapter_bytes": "adapters",
    "gradient_bytes": "gradients",
    "live_bytes": "live values",
    "slack_bytes": "heap slack",
    "cache_bytes": "allocator cache",
    "kept_bytes": "kept values",
    "materialized_bytes": "dequantized weights",
}
OTHERS = "other planned"


def breakdown(plan: Mapping[str, Any], peak_bytes: int) -> dict[str, Any]:
    """The bytes of each owner, and the remainder with its share of the peak."""
    owners = {name: int(plan.get(key, 0)) for key, name in OWNERS.items()}
    owners[OTHERS] = plan["predicted_peak_bytes"] - sum(owners.values())
    remainder = peak_bytes - sum(owners.values())
    share = remainder / peak_bytes
    return {
        "peak_bytes": peak_bytes,
        "owners_bytes": owners,
        "not_accounted_bytes": remainder,
        "not_accounted_share": share,
        "accounted": abs(share) <= SHARE_NOT_ACCOUNTED,
        "largest": largest(plan),
    }


def largest(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The block and direction in which the plan counts the most live bytes; the first of equals."""
    passes = [
        {"block": block["name"], "direction": direction, "bytes": block[f"{direction}_bytes"]}
        for block in plan["blocks"]
        for direction in ("forward", "backward")
    ]
    return max(passes, key=lambda one: one["bytes"])
