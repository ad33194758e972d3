"""A model's continuations before and after training, beside those that the data hold.

The prompts are the beginnings of a run's own held-out rows (of its training rows, where it has no
others), and each is continued with the most likely tokens: by the base model, and with the adapter
of each run. This happens when a page is made, in its process; no training pays for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.report.table import Table
from runtime.adapters.mlx_lm import WEIGHTS
from runtime.core.errors import BundleError
from runtime.data.prompts import Prompt
from runtime.data.rows import Rows, TokenRows
from runtime.data.run_rows import TOKENS
from runtime.data.text_encoder import TextEncoder, load_encoder
from runtime.run.generate import Generator
from runtime.run.session import open_checked

MOST_PROMPT = 32  # tokens of a prompt, where all of a row is scored
MORE, MOST_TOKENS = 8, 64  # a continuation may be so much longer than the expected one, and so long
OF_ROWS = dict(zip(TOKENS, ("training rows", "held-out rows"), strict=True))


@dataclass(frozen=True)
class Question:
    """A prompt, and the tokens that follow it in the data."""

    prompt: Prompt
    expected: list[int]

    @property
    def most_tokens(self) -> int:
        """The length at which a continuation is cut."""
        return min(len(self.expected) + MORE, MOST_TOKENS)


@dataclass
class Group:
    """Runs of one bundle that are asked the same: their names and folders."""

    generator: Generator[TextEncoder]
    rows: str
    questions: list[Question]
    runs: dict[str, Path] = field(default_factory=dict)

    def table(self) -> Table:
        """A line for each question; a column for the base model and for each run."""
        encoder = self.generator.encoder
        columns = [
            [
                encoder.show(without(encoder.bos, question.prompt.tokens))
                for question in self.questions
            ],
            [encoder.decode(question.expected) for question in self.questions],
            self._said(None),
            *map(self._said, self.runs.values()),
        ]
        head = ("prompt", "in the data", "before training", *(f"after: {run}" for run in self.runs))
        lines = [tuple(text.strip() for text in line) for line in zip(*columns, strict=True)]
        title = f"Samples from {self.rows}"
        return Table(title, [head, *lines], left=len(head), wrapped=True)

    def _said(self, run: Path | None) -> list[str]:
        if run is not None and not (run / WEIGHTS).exists():
            return ["(nothing is saved yet)"] * len(self.questions)
        adapters = self.generator.adapters(run)
        return [
            self.generator.text(question.prompt, adapters, question.most_tokens)
            for question in self.questions
        ]


def sample_tables(
    runs: Sequence[tuple[str, Path, Mapping[str, Any]]], count: int
) -> tuple[list[Table], list[str]]:
    """Tables of `count` samples for runs (name, folder, settings), and why others have none.

    Runs of the same bundle and rows share a table.

    Raises:
        BundleError: the bundle of a run is gone or damaged.
    """
    groups: list[Group] = []
    notes: list[str] = []
    generators: dict[str, Generator[TextEncoder]] = {}
    for name, path, settings in runs:
        file = next((tokens for tokens in reversed(TOKENS) if (path / tokens).exists()), None)
        if file is None:
            notes.append(f"{name} has no samples: its rows are not text.")
            continue
        source = str(settings["bundle"])
        if source not in generators:
            generators[source] = _generator(path, source)
        generator = generators[source]
        rows = TokenRows(path / file, generator.bundle.manifest.vocab_size)
        asked = Group(generator, OF_ROWS[file], questions(rows, generator.encoder, count))
        same = (
            earlier
            for earlier in groups
            if (earlier.generator, earlier.rows, earlier.questions)
            == (generator, asked.rows, asked.questions)
        )
        group = next(same, asked)
        if group is asked:
            groups.append(asked)
        group.runs[name] = path
    return [group.table() for group in groups], notes


def without(bos: int | None, tokens: list[int]) -> list[int]:
    """The tokens without the BOS at their beginning, if it is there."""
    return tokens[1:] if tokens[:1] == [bos] else tokens


def questions(rows: Rows, encoder: TextEncoder, count: int) -> list[Question]:
    """The questions of the first `count` rows."""
    return [question(rows, at, encoder) for at in range(min(count, len(rows)))]


def question(rows: Rows, index: int, encoder: TextEncoder) -> Question:
    """The beginning of a row up to its first scored tokens, and these.

    Of a row that is scored from its beginning (text), the first half is the prompt.
    """
    tokens, scored = (part.tolist() for part in rows.row(index))
    start = scored[0] + 1
    together = (n for n, position in enumerate(scored) if position != scored[0] + n)
    stop = start + next(together, len(scored))
    if start == 1:
        start = max(1, min(stop // 2, MOST_PROMPT))
    expected = tokens[start:stop]
    last = {expected[-1]} & encoder.special  # the token with which the template ends an answer
    return Question(Prompt(tokens[:start], encoder.end_tokens | last), expected)


def _generator(run: Path, source: str) -> Generator[TextEncoder]:
    try:
        bundle = open_checked(source)
    except BundleError as problem:
        raise BundleError(
            f"{run} was trained from {source}, which samples need: {problem}; put the bundle back, "
            "or leave out --samples"
        ) from None
    return Generator(bundle, load_encoder(bundle.path))
