"""The sentiment task SST-2, prompted as in MeZO's paper (appendix E.2): "SENTENCE It was great".

    python -m harness.tasks.sst2 TRAIN_TSV DEV_TSV -o DIR [--train-rows N --dev-rows N --seed N]
    python -m harness.tasks.sst2 eval BUNDLE --data DIR [--adapter RUN]

The first command draws rows from a seed and writes DIR/train.jsonl and DIR/valid.jsonl; their loss
is that of the label word, " great" or " terrible" (and of the end token, where the tokenizer has
one). The second prints the accuracy of the label words on DIR/valid.jsonl. Invariant: no sentence
is in both files, or twice in one; labels are not balanced.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.measure.command import ondevice
from harness.tasks.examples import Example, write_jsonl
from runtime.core.errors import DataError, OnDeviceError

LABELS = {"1": " great", "0": " terrible"}


def read_tsv(file: Path) -> dict[str, str]:
    """Label ("0" or "1") by sentence, of lines SENTENCE TAB LABEL; a heading line is skipped.

    Raises:
        DataError: a line is something else.
    """
    labels: dict[str, str] = {}
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{file} cannot be read: {problem}") from None
    for number, line in enumerate(lines, start=1):
        sentence, tab, label = line.rpartition("\t")
        if number == 1 and label == "label":
            continue
        if not tab or label not in LABELS or not sentence.strip():
            raise DataError(f"{file}, line {number}: expected a sentence, a tab, and 0 or 1")
        labels.setdefault(sentence.strip(), label)
    return labels


def draw(rows: dict[str, str], count: int, seed: int) -> list[Example]:
    """`count` rows drawn from a seed.

    Raises:
        DataError: there are too few.
    """
    sentences = sorted(rows)
    if len(sentences) < count:
        raise DataError(
            f"there are {len(sentences)} different sentences, not {count}; ask for less"
        )
    chosen = random.Random(seed).sample(sentences, count)
    return [Example(prompt_of(sentence), LABELS[rows[sentence]]) for sentence in chosen]


def prompt_of(sentence: str) -> str:
    """The prompt for a sentence, which the label word completes."""
    return f"{sentence} It was"


def prepare(train: Path, dev: Path, out: Path, train_rows: int, dev_rows: int, seed: int) -> None:
    """Write `out`/train.jsonl and `out`/valid.jsonl."""
    held_out = read_tsv(dev)
    valid = draw(held_out, dev_rows, seed)
    drawn = [row.prompt for row in valid]
    others = {s: label for s, label in read_tsv(train).items() if prompt_of(s) not in drawn}
    rows = draw(others, train_rows, seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, examples in (("train", rows), ("valid", valid)):
        write_jsonl(out / f"{name}.jsonl", examples)
        counts = Counter(example.completion.strip() for example in examples)
        shares = ", ".join(f"{counts[label.strip()]} {label.strip()}" for label in LABELS.values())
        print(f"{out / name}.jsonl: {len(examples)} rows, {shares}")


def read_jsonl(file: Path) -> list[Example]:
    """The rows of a file that `prepare` wrote.

    Raises:
        DataError: the file holds something else.
    """
    examples = []
    try:
        lines = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        for number, line in enumerate(lines, start=1):
            row = Example(**json.loads(line))
            if row.completion not in LABELS.values():
                raise DataError(f"{file}, line {number}: {row.completion!r} is no label word")
            examples.append(row)
    except (OSError, ValueError, TypeError) as problem:
        raise DataError(f"{file} holds no rows of this task: {problem}") from None
    return examples


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        (_eval if arguments[:1] == ["eval"] else _prepare)(arguments)
    except OnDeviceError as problem:
        print(f"harness.tasks.sst2: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


def _prepare(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.tasks.sst2", description=__doc__)
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--train-rows", type=int, default=1000)
    parser.add_argument("--dev-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    prepare(given.train, given.dev, given.output, given.train_rows, given.dev_rows, given.seed)


def _eval(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m harness.tasks.sst2 eval", description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--data", type=Path, required=True, help="directory with valid.jsonl")
    parser.add_argument("--adapter", type=Path, help="a run; without it, the bundle as it is")
    given = parser.parse_args(arguments[1:])
    file = given.data / "valid.jsonl"
    read_jsonl(file)  # these are rows of this task, with both of its label words
    options = [] if given.adapter is None else [f"--adapter={given.adapter}"]
    report = ondevice("eval", given.bundle, f"--data={file}", "--task=labels", "--json", *options)
    print(report.strip())


if __name__ == "__main__":
    sys.exit(main())
