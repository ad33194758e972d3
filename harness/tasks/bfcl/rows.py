"""Rows of the leaderboard's questions: to train on, and to be asked.

`prepare` writes train.jsonl, whose completions are right calls by the leaderboard's own checker;
valid.jsonl, the held-out questions with their ids, for `ondevice eval --task bfcl`; and rows.json,
which counts the rows that were left out.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.tasks.bfcl import package
from harness.tasks.bfcl.calls import read
from harness.tasks.bfcl.package import Question
from harness.tasks.bfcl.prompt import completion_of, prompt_of
from runtime.core.documents import from_json
from runtime.core.errors import DataError
from runtime.core.files import write_atomic

KEPT, TOO_LONG, NOT_RIGHT, NOT_DRAWN = "rows", "too_long", "not_right", "not_drawn"


@dataclass(frozen=True)
class CallRow:
    """A question's id, its prompt and, as its completion, right calls."""

    id: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Wanted:
    """Which rows a file gets: questions of categories, at most `most` (0: all), drawn by a seed.

    With `right_only`, rows whose completion the checker does not take are left out.
    """

    categories: Sequence[str]
    most: int
    seed: int
    right_only: bool

    def rows(self, fits: Callable[[CallRow], bool]) -> tuple[list[CallRow], dict[str, Any]]:
        """The rows that fit, in random order, and the fate of each category's questions."""
        fitting: list[tuple[str, CallRow]] = []
        counts: dict[str, Counter[str]] = {}
        for category in self.categories:
            count = counts.setdefault(category, Counter(questions=0))
            for question in package.questions(category):
                count["questions"] += 1
                row = CallRow(question.name, prompt_of(question), completion_of(question))
                if not fits(row):
                    count[TOO_LONG] += 1
                elif self.right_only and not completes(question, row):
                    count[NOT_RIGHT] += 1
                else:
                    fitting.append((category, row))
        random.Random(f"bfcl/{self.seed}").shuffle(fitting)
        kept = fitting[: self.most] if self.most else fitting
        for category, _ in kept:
            counts[category][KEPT] += 1
        for category, _ in fitting[len(kept) :]:
            counts[category][NOT_DRAWN] += 1
        return [row for _, row in kept], {name: dict(count) for name, count in counts.items()}


def completes(question: Question, row: CallRow) -> bool:
    """Whether the checker takes a row's completion as right, read as an answer is."""
    calls = read(row.completion)
    return not package.check(question, calls) if question.answers else not calls


def prepare(
    out: Path, train: Wanted, held_out: Wanted, fits: Callable[[CallRow], bool]
) -> dict[str, Any]:
    """Write the files to the folder `out`; returns the counts, which rows.json holds.

    Raises:
        DataError: no row is left, or the package is missing.
        StorageError: a file cannot be written.
    """
    counts: dict[str, Any] = {"bfcl_eval": package.version()}
    made = {}
    for name, wanted in (("train", train), ("valid", held_out)):
        made[name], counts[name] = wanted.rows(fits)
        if not made[name]:
            raise DataError(
                f"no question of {', '.join(wanted.categories)} fits; give a longer "
                "--max-seq-length, or other categories"
            )
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in made.items():
        lines = (json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
        write_atomic(out / f"{name}.jsonl", "".join(lines).encode())
    write_atomic(out / "rows.json", (json.dumps(counts, indent=1) + "\n").encode())
    return counts


def read_rows(file: Path) -> list[CallRow]:
    """The rows of a file that `prepare` wrote, or of one like it.

    Raises:
        DataError: the file holds something else.
    """
    rows = []
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            row = from_json(line)
            fields = (row.get(key) if isinstance(row, dict) else None for key in ("id", "prompt"))
            name, prompt = fields
            if not (isinstance(name, str) and isinstance(prompt, str) and prompt.strip()):
                raise DataError(
                    f"{file}, line {number}: a question has an id and a prompt; "
                    "python -m harness.tasks.bfcl prepare writes such rows"
                )
            rows.append(CallRow(name, prompt, ""))
    except (OSError, ValueError) as problem:
        raise DataError(f"{file} holds no questions: {problem}") from None
    if not rows:
        raise DataError(f"{file} holds no questions")
    return rows
