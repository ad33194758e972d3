"""The command that fuzzes: which kinds, how many cases, from which seed."""

from __future__ import annotations

import os

os.environ.update(OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # forks take no threads
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.machine.backend import prepare

prepare()  # before MLX is imported

from fuzz.campaign import FINE, Campaign, Case, Counts, cases_of  # noqa: E402
from fuzz.kinds import KINDS  # noqa: E402
from fuzz.kinds.kills import KILLS, Killing  # noqa: E402

SHOWN_EVERY_S = 20
ALL = (*KINDS, *KILLS)


def _preload() -> None:
    """Import what cases use, so that no forked child has to."""
    import mlx_lm.models.gemma3_text
    import mlx_lm.models.qwen2  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import runtime.data.tokenizing
    import runtime.run.evaluate
    import runtime.run.start  # noqa: F401


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Change inputs at random and read them. What has broken a reader before comes "
        "first. Ends with 1 if a case ended by a signal, in a traceback, too late, or with another "
        "result and no word.",
    )
    parser.add_argument(
        "--kind", default=",".join(ALL), help=f"of {', '.join(ALL)}, with commas (default: all)"
    )
    parser.add_argument("--count", type=int, default=100, help="random cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the random cases")
    parser.add_argument("--first", type=int, help="the number of the first (default: as counted)")
    parser.add_argument("--known", type=int, help="known cases of each kind (default: all)")
    parser.add_argument("--name", help="run only this known case")
    parser.add_argument("--counts", type=Path, help="JSON file of counts, added to after each case")
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"), help="folder for finds")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    given = _parser().parse_args(words)
    names = given.kind.split(",")
    if unknown := [name for name in names if name not in ALL]:
        print(f"no kind {unknown[0]!r}; there are {', '.join(ALL)}")
        return 2
    if given.name and not all(given.name in KINDS[name].known for name in names if name in KINDS):
        print(f"{given.kind} has no known case {given.name!r}")
        return 2
    _preload()
    counts = Counts() if given.counts is None else Counts.read(given.counts)
    found_before = len(counts.finds)
    with tempfile.TemporaryDirectory(prefix="ondevice-fuzz-") as folder:
        campaign = Campaign(Path(folder).resolve(), given.finds.resolve(), counts)
        for name in names:
            first = counts.cases(name) if given.first is None else given.first
            if name in KILLS:
                cases = Killing(campaign, KILLS[name], given.seed, first, given.count).run()
            else:
                cases = _ordinary(campaign, name, given, first)
            shown = time.monotonic()
            for done in cases:
                if done not in FINE:
                    find = counts.finds[-1]
                    print(f"{name}: {done}: {find['name'] or find['number']}: {find['changed']}")
                if given.counts is not None:
                    counts.write(given.counts)
                if time.monotonic() - shown > SHOWN_EVERY_S:
                    shown = time.monotonic()
                    print(f"{name}: {dict(counts.verdicts[name])}", flush=True)
            print(f"{name}: {dict(counts.verdicts.get(name, {}))}", flush=True)
    return int(len(counts.finds) > found_before)


def _ordinary(
    campaign: Campaign, name: str, given: argparse.Namespace, first: int
) -> Iterator[str]:
    """The verdicts of a kind's known and random cases."""
    kind = KINDS[name]()
    campaign.prepare(kind)
    if given.name:
        cases = [Case(kind, given.seed, 0, given.name)]
    else:
        cases = cases_of(kind, given.seed, first, given.count, given.known)
    yield from map(campaign.run, cases)
