"""The Berkeley Function Calling Leaderboard as a task: rows to train on, and questions to ask.

    python -m harness.tasks.bfcl prepare BUNDLE -o FOLDER

writes rows for training and held-out questions, which `ondevice eval BUNDLE --data FOLDER --task
bfcl` asks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.tasks.bfcl.package import LIVE, NON_LIVE
from harness.tasks.bfcl.rows import CallRow, Wanted, prepare
from runtime.core.errors import OnDeviceError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.tasks.bfcl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="prepare")
    _prepare_options(commands.add_parser("prepare", help="write rows to train on and to ask"))
    given = parser.parse_args(argv)
    try:
        given.work(given)
    except OnDeviceError as problem:
        print(f"harness.tasks.bfcl: {problem}", file=sys.stderr)
        return problem.exit_code
    return 0


def _prepare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="bundle whose tokenizer counts tokens")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--max-seq-length", type=int, default=512,
        help="tokens of a prompt and its answer together; longer rows are left out",
    )  # fmt: skip
    parser.add_argument("--train-rows", type=int, default=0, help="at most so many; 0 for all")
    parser.add_argument("--valid-rows", type=int, default=0, help="at most so many; 0 for all")
    for name, those in (("train", NON_LIVE), ("valid", LIVE)):
        parser.add_argument(
            f"--{name}-categories", type=lambda text: text.split(","), default=those,
            help=f"categories, separated by commas (default: {','.join(those)})",
        )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the draw and the order")
    parser.set_defaults(work=_prepare)


def _prepare(given: Any) -> None:
    from runtime.data.fields import Completion
    from runtime.data.loss_mask import row_of
    from runtime.data.text_encoder import load_encoder

    encoder = load_encoder(given.bundle)

    def fits(row: CallRow) -> bool:
        made = row_of(Completion(row.prompt, row.completion), encoder, "assistant")
        return made.predicted_tokens <= int(given.max_seq_length)

    train = Wanted(given.train_categories, given.train_rows, given.seed, right_only=True)
    valid = Wanted(given.valid_categories, given.valid_rows, given.seed, right_only=False)
    counts = prepare(given.output, train, valid, fits)
    for name in ("train", "valid"):
        print(f"{given.output / name}.jsonl")
        for category, numbers in counts[name].items():
            told = ", ".join(
                f"{number} {what.replace('_', ' ')}" for what, number in numbers.items()
            )
            print(f"  {category}: {told}")


if __name__ == "__main__":
    sys.exit(main())
