"""Label words of an evaluation: how often each is the right one, and how often it is answered.

A row's label is the first token that has a loss, and its answer is the most likely of all labels
there; the rest of the vocabulary does not compete. Training raises the same share with
`--objective labels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.objectives.labels import Ids, LabelAccuracy
from runtime.objectives.protocol import Scored
from runtime.run.evaluation import LabelShare


@dataclass
class LabelTally(LabelAccuracy):
    """The objective over labels, which also counts each label."""

    expected: list[int] = field(default_factory=list)
    answered: list[int] = field(default_factory=list)

    def answers(self, sample: Scored) -> tuple[Ids, Ids]:
        expected, answered = super().answers(sample)
        self.expected += expected.tolist()
        self.answered += answered.tolist()
        return expected, answered

    def shown(self, mean: float) -> dict[str, float]:
        return {"label_accuracy": -mean}

    def summary(self, show: Callable[[Sequence[int]], str]) -> tuple[LabelShare, ...]:
        """Of each label its token, its text, and its shares of the rows.

        `show` is the tokenizer's text of tokens.
        """
        rows = len(self.expected)
        return tuple(
            LabelShare(
                token,
                show([token]),
                self.expected.count(token) / rows,
                self.answered.count(token) / rows,
            )
            for token in self.labels.tolist()
        )
