"""The objectives that training can improve, by name: where the code of each is, and its help.

Objectives are named here and nowhere else, and `--objective` takes these names. The first one is
the default.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """The module of an objective, and the end of the sentence "training improves …"."""

    module: str
    improves: str


OBJECTIVES: dict[str, Entry] = {
    "loss": Entry("runtime.objectives.next_token", "the loss"),
    "accuracy": Entry(
        "runtime.objectives.accuracy", "the share of scored tokens that are the most likely"
    ),
    "exact": Entry(
        "runtime.objectives.exact_match",
        "the share of rows whose scored tokens all are the most likely",
    ),
    "labels": Entry(
        "runtime.objectives.labels",
        "the share of rows whose answer begins with the most likely of all labels, which are the "
        "first tokens of the training rows' answers",
    ),
}
