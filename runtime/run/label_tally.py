"""Label words of an evaluation: how often each is the right one, and how often it is answered.

A row's label is the first token that has a loss, and its answer is the most likely of all labels
there; the rest of the vocabulary does not compete. Training raises the same share with
`--objective labels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from runtime.engine.model import Model
from runtime.engine.sample import Row
from runtime.methods.objectives import Ids, best_labels


@dataclass
class LabelTally:
    """Counts over rows, for the tokens `labels` (K,)."""

    labels: Ids
    expected: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    def add(self, model: Model, hs: Sequence[mx.array], rows: Sequence[Row]) -> None:
        """Count rows, of which `hs` are the hidden states (N, D) where a token has a loss."""
        first = mx.concatenate([h[:1] for h in hs])  # (rows, D)
        self.answered += best_labels(model, first, self.labels, {}).tolist()
        self.expected += [int(row.targets[0]) for row in rows]

    def summary(self, show: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """`label_accuracy`, and of each label its token, its text, and its shares of the rows.

        `show` is the tokenizer's text of tokens.
        """
        rows = len(self.expected)
        right = sum(one == other for one, other in zip(self.expected, self.answered, strict=True))
        return {
            "label_accuracy": right / rows,
            "labels": [
                {
                    "token": token,
                    "text": show([token]),
                    "share": self.expected.count(token) / rows,
                    "answered": self.answered.count(token) / rows,
                }
                for token in self.labels.tolist()
            ],
        }
