"""The objectives that training can improve, by name: where the code of each is.

Objectives are named here and nowhere else, and `--objective` takes these names. The first one is
the default.
"""

from __future__ import annotations

OBJECTIVES: dict[str, str] = {
    "loss": "runtime.objectives.next_token",
    "accuracy": "runtime.objectives.accuracy",
    "exact": "runtime.objectives.exact_match",
    "labels": "runtime.objectives.labels",
}
