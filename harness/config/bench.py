"""The options of `ondevice bench`, of `ondevice doctor`, which may measure too, and of `report`.

Lists (models, lengths, budgets, peers) are one text with commas, with each name once. If a
list is left out, the benchmark's default applies: in a paper's table, the paper's own list.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass
from typing import ClassVar

from runtime.config.base import (
    ALL_FILLED,
    COUNT,
    FILLED,
    MOST,
    MOST_TOKENS,
    SEED,
    Check,
    Config,
    expanded,
    is_size,
    option,
)

_SMALLEST = re.compile(r"(?:(?P<times>[0-9]{1,4}(?:\.[0-9]+)?)x)?min")


def parts(text: str | None) -> tuple[str, ...]:
    """The names in a list; none where there is no list, and a benchmark's own apply."""
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _once(text: str) -> bool:
    return all(parts(text)) and len({*parts(text)}) == len(parts(text)) > 0


def _are_lengths(text: str) -> bool:
    short = (p.isascii() and p.isdecimal() and len(p) <= len(str(MOST_TOKENS)) for p in parts(text))
    return _once(text) and all(short) and all(1 <= int(p) <= MOST_TOKENS for p in parts(text))


def times_smallest(budget: str) -> float | None:
    """The factor of "min" or "2xmin", the smallest budget that fits; None for a size."""
    match = _SMALLEST.fullmatch(budget)
    return float(match["times"] or 1) if match else None


MODEL_NAMES = Check(_once, "names, each once")
LENGTHS = Check(_are_lengths, f"whole numbers from 1 to {MOST_TOKENS:,}, each once")
_BUDGETS = Check(
    lambda text: _once(text) and all(times_smallest(p) or is_size(p) for p in parts(text)),
    "sizes such as 300MB, min for the smallest that fits or 2xmin for twice as much, each once",
)
_RUNS = Check(
    lambda runs: bool(runs) and ALL_FILLED.allows(runs),
    "one or more run directories",
    stored=ALL_FILLED.stored,
)
_PAGE = Check(lambda name: name.endswith(".html"), "a name that ends in .html", stored=expanded)
_DTYPES = Check(
    lambda text: _once(text) and {*parts(text)} <= {"float32", "bfloat16"},
    "float32, bfloat16 or float32,bfloat16",
)
_TIMED = Check(
    lambda value: 2 <= value <= MOST,
    f"2 or more, at most {MOST:,}: the first step of a process is not timed",
)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Config):
    """The options of `ondevice bench`, which runs a benchmark on this machine."""

    positional = "name"

    name: str = option(
        "", "benchmark, such as mebp-table2; without a name, all are listed", metavar="NAME"
    )
    bundles: str = option(
        "bundles", "directory of the bundles, which are exported when first needed", FILLED
    )
    models: str | None = option(
        None, "models, as a,b (else the benchmark's own)", MODEL_NAMES, metavar="NAMES"
    )
    seq_lens: str | None = option(
        None, "tokens per row, as 128,256 (else the benchmark's own)", LENGTHS, metavar="N,N,..."
    )
    budget: str | None = option(
        None,
        "budgets, as 1GB,min,2xmin; min: the smallest that fits (else the benchmark's own)",
        _BUDGETS,
        metavar="SIZE,SIZE,...",
    )
    compute_dtype: str = option(
        "float32",
        "what ours computes products in: float32, bfloat16 or float32,bfloat16",
        _DTYPES,
        metavar="NAMES",
    )
    steps: int = option(3, "steps of each process; the first is not timed", _TIMED)
    repeats: int = option(2, "fresh processes of each variant, which run in turn", COUNT)
    seed: int = option(0, "seed of the random rows", SEED)
    python: str | None = option(
        None,
        "for peers: an interpreter that has torch and peft; for generation: one that has llama_cpp "
        "and mlx-lm",
        FILLED,
    )
    peers: str | None = option(
        None, "for peers: the programs to run, as ours,torch-float32", MODEL_NAMES, metavar="NAMES"
    )
    output: str | None = option(None, "JSON file to write (else NAME.json)", FILLED)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths given on the command line, ascending; empty for the benchmark's default."""
        return tuple(sorted(map(int, parts(self.seq_lens))))


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(Config):
    """The options of `ondevice doctor`, which looks at the machine and the installed packages."""

    positional: ClassVar[str] = ""

    bench: bool = option(
        False,
        "also train three model shapes with random weights, and print the row that this machine "
        "adds to a table of speeds and footprints (`ondevice bench doctor` takes other shapes)",
    )


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """The options of `ondevice report`, which shows runs as one page of HTML."""

    positional: ClassVar[str] = "runs"

    runs: tuple[str, ...] = option(
        MISSING, "run directories, written by `ondevice train`", _RUNS, metavar="RUN..."
    )
    output: str = option(
        "report.html",
        "page to write; one that is there already is replaced",
        _PAGE,
        metavar="FILE",
        aliases=("-o",),
    )
