"""Runs cases of kinds, tells how each ended, keeps what should not have happened, and counts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from fuzz.child import FAILED, SECONDS, Ended, Tell, in_child
from fuzz.kind import Kind
from runtime.core.files import write_atomic

REFUSALS = (2, 3, 4, 5)
DIVERGED = 1
TRACEBACK = "Traceback (most recent call last)"
# verdicts that are as they should be; all others are finds
REFUSED, IDENTICAL, OTHER, DIVERGED_CLEANLY = "refused", "identical", "other", "diverged"
FINE = (REFUSED, IDENTICAL, OTHER, DIVERGED_CLEANLY)
SAID = 2000  # characters of what a case wrote that are kept
PREPARING_S = 300  # of the CPU, for all originals of a kind


@dataclass(frozen=True)
class Case:
    """One change of one input: the same for the same seed and number, or for the same name.

    name: of a change in `Kind.known`; empty for a random one.
    """

    kind: Kind
    seed: int
    number: int
    name: str = ""

    @property
    def label(self) -> str:
        """A name of the case that can be a file's."""
        if not self.name:
            return f"{self.kind.name}-{self.seed}-{self.number}"
        words = re.sub(r"[^A-Za-z0-9]+", "-", self.name)[:60]
        return f"{self.kind.name}-{words}-{crc32(self.name.encode()):08x}"

    @property
    def rng(self) -> np.random.Generator:
        seed = [self.seed, self.number, *self.label.encode()]
        return np.random.default_rng(seed)


@dataclass
class Counts:
    """How often each verdict was found, by kind, and what should not have happened."""

    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    finds: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Counts:
        """The counts in a file; none where there is no file."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_bytes())
        verdicts = {name: Counter(counted) for name, counted in found["verdicts"].items()}
        return cls(verdicts, found["finds"])

    def write(self, path: Path) -> None:
        document = {"verdicts": self.verdicts, "finds": self.finds}
        write_atomic(path, json.dumps(document, indent=1).encode() + b"\n")

    def add(self, kind: str, verdict: str) -> None:
        self.verdicts.setdefault(kind, Counter())[verdict] += 1

    def cases(self, kind: str) -> int:
        """How many cases of a kind there were."""
        return sum(self.verdicts.get(kind, Counter()).values())


class Campaign:
    """Cases below one folder; what is found stays in `finds`, everything else is removed."""

    def __init__(self, folder: Path, finds: Path, counts: Counts) -> None:
        self.folder, self.finds, self.counts = folder, finds, counts
        self.untouched: dict[tuple[Path, str], Any] = {}
        # what is traced for bundles from elsewhere is kept here, never in the user's own cache
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")

    def originals(self, kind: Kind) -> Path:
        return self.folder / "originals" / (kind.made_by or kind.name)

    def prepare(self, kind: Kind) -> None:
        """Make the originals of a kind, and read them."""
        folder = self.originals(kind)
        if folder.exists():
            return  # another kind has made them
        folder.mkdir(parents=True)

        def make(tell: Tell) -> int:
            kind.prepare(folder)
            return 0

        done = in_child(make, folder / "said", PREPARING_S)
        if done.code or done.signal or done.late:
            raise RuntimeError(f"{kind.name} cannot be prepared: {done}")
        for original in kind.originals:
            found = self._reading(kind, original, self.folder / "untouched", PREPARING_S)
            if found.code or found.signal or not found.told:
                raise RuntimeError(f"{kind.name}: {original} cannot be read: {found}")
            self.untouched[folder, original] = found.told[-1]["facts"]
            shutil.rmtree(self.folder / "untouched")

    def _reading(self, kind: Kind, original: str, work: Path, seconds: float) -> Ended:
        """An original as it is, read."""

        def read(tell: Tell) -> int:
            os.chdir(work)
            kind.copy(self.originals(kind) / original, work / "input")
            found = kind.read(work / "input", self.originals(kind) / original)
            tell({"facts": found.facts})
            return found.code

        work.mkdir()
        return in_child(read, work / "said", seconds)

    def run(self, case: Case) -> str:
        """Run a case; returns its verdict."""
        kind, work = case.kind, self.folder / case.label
        original = kind.choose(case.rng)

        def read(tell: Tell) -> int:
            os.chdir(work)
            rng = case.rng
            kind.choose(rng)  # the same draw again
            kind.copy(self.originals(kind) / original, work / "input")
            change = kind.known[case.name] if case.name else kind.change
            tell({"changed": change(work / "input", rng)})
            found = kind.read(work / "input", self.originals(kind) / original)
            tell({"facts": found.facts, "free": found.free})
            return found.code

        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        ended = in_child(read, work / "said", SECONDS)
        if not ended.told:
            raise RuntimeError(f"{case.label}: the input could not be changed: {ended}")
        verdict = self._verdict(ended, self.untouched[self.originals(kind), original])
        self.counts.add(kind.name, verdict)
        if verdict not in FINE:
            self._keep(case, original, work, ended, verdict)
        shutil.rmtree(work)
        return verdict

    @staticmethod
    def _verdict(ended: Ended, expected: Any) -> str:
        if ended.late:
            return "hang"
        if ended.signal:
            return f"signal {signal.Signals(ended.signal).name}"
        if ended.code == FAILED or TRACEBACK in ended.said:
            return "traceback"
        found = ended.told[-1] if ended.told else {}
        if ended.code in REFUSALS:
            return REFUSED
        if "facts" not in found:
            return f"exit code {ended.code}"
        if ended.code == DIVERGED and found["free"]:
            return DIVERGED_CLEANLY
        if ended.code:
            return f"exit code {ended.code}"
        if found["facts"] == expected:
            return IDENTICAL
        return OTHER if found["free"] else "silent difference"

    def _keep(self, case: Case, original: str, work: Path, ended: Ended, verdict: str) -> None:
        changed = [one["changed"] for one in ended.told if "changed" in one]
        find = {
            "kind": case.kind.name,
            "seed": case.seed,
            "number": case.number,
            "name": case.name,
            "original": original,
            "verdict": verdict,
            "changed": changed[0] if changed else None,
            "said": ended.said[-SAID:],
        }
        self.keep(work, find)

    def keep(self, work: Path, find: dict[str, Any]) -> None:
        """Keep the folder of a case that should have ended otherwise, and note what it was."""
        self.finds.mkdir(parents=True, exist_ok=True)
        place = self.finds / f"{work.name}.tar.gz"
        with tarfile.open(place, "w:gz") as kept:  # not a copy: it would wait for a FIFO's writer
            kept.add(work, work.name)
        self.counts.finds.append({**find, "kept": str(place)})


def cases_of(
    kind: Kind, seed: int, first: int, count: int, known: int | None = None
) -> Iterator[Case]:
    """What has broken a reader before, then `count` random cases from number `first` on.

    known: how many of the former there are, drawn by the seed; None for all.
    """
    names = list(kind.known)
    if known is not None:
        names = sorted(np.random.default_rng(seed).permutation(names)[:known])
    for name in names:
        yield Case(kind, seed, 0, name)
    for number in range(first, first + count):
        yield Case(kind, seed, number)
