"""Workers that share the points of a zeroth-order step make a single worker's, bit for bit.

MLX binds a graph to one thread, so the workers of a process run one after the other: each gets what
a single worker's run has gathered, after the part that it must have computed itself is compared.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bundles import Tiny
from support.estimators import OPTIONS, config_of, rows_of, started
from support.exchange import NEEDS_MPI, two_processes
from support.models import adapters_of, model_of

from runtime.bundle.store import Bundle
from runtime.core.errors import UsageError
from runtime.methods.adapters import Adapters
from runtime.parallel.exchange import Alone, Exchange

TILES = {"tile_values": 20_000, "chunk_rows": 200}
POINTS_OF_ITS_OWN = ("fzoo", "one-point", "hizoo", "zo-act", "gradient-norm")
CASES: dict[str, dict[str, Any]] = {
    "mezo": {"queries": 2},
    **{case: OPTIONS[case] for case in POINTS_OF_ITS_OWN},
}
ROWS, STEPS = 2, 2


class Recorded(Alone):
    """A single worker, and all that it has gathered."""

    def __init__(self) -> None:
        self.gathered: list[list[float]] = []

    def gather(self, values: Sequence[float], counts: Sequence[int]) -> list[float]:
        self.gathered.append(super().gather(values, counts))
        return self.gathered[-1]


class Replayed(Exchange):
    """One of several workers, whose others are those of a record."""

    def __init__(self, rank: int, size: int, recorded: Recorded) -> None:
        self.rank, self.size = rank, size
        self.left = list(recorded.gathered)

    def all_bytes(self, message: bytes) -> list[bytes]:
        raise NotImplementedError

    def gather(self, values: Sequence[float], counts: Sequence[int]) -> list[float]:
        everything = self.left.pop(0)
        assert len(everything) == sum(counts) and len(counts) == self.size
        first = sum(counts[: self.rank])
        mine = everything[first : first + counts[self.rank]]
        assert struct.pack(f"{len(values)}d", *values) == struct.pack(f"{len(mine)}d", *mine)
        return everything


def run_on(exchange: Exchange, bundle: Bundle, case: str, seed: int, folder: Path) -> list[Any]:
    """The steps' records and results, and the SHA-256 of the adapters after them."""
    rng = np.random.default_rng(seed)
    own = folder / f"{exchange.rank}-{exchange.size}"
    own.mkdir(parents=True)
    model, adapters = model_of(bundle, 16, **TILES), adapters_of(bundle, rng)
    if case == "zo-act":
        adapters = Adapters.initial(bundle.manifest, seed)
    config = config_of(case, seed, **CASES[case])
    lanes = 2 + exchange.rank  # the hidden states beside it change no loss
    method = replace(started(config, model, adapters, own, ROWS, lanes), exchange=exchange)
    results: list[Any] = []
    for step in range(STEPS):
        result = method.step(step, 1e-5, [rows_of(bundle, rng, ROWS)])
        assert result.skipped == 0
        loss = [result.loss.loss_sum, result.loss.scored_tokens]
        results.append([result.record, loss, result.forward_passes, dict(result.shown)])
    assert results[-1][0][1][0] != 0, "nothing was learnt"
    method.settle()
    tensors = b"".join(np.array(adapters.tensors[name]).tobytes() for name in adapters.tensors)
    return [*results, sha256(tensors).hexdigest()]


@pytest.mark.parametrize("case", [*CASES])
def test_workers_make_the_steps_of_one(tiny: Tiny, seed: int, case: str, tmp_path: Path) -> None:
    """Two or three of them, also where they cannot share the points evenly."""
    bundle, recorded = tiny("qwen3"), Recorded()
    alone = run_on(recorded, bundle, case, seed, tmp_path)
    size = 2 if case == "one-point" else 3
    for rank in range(size):
        worker = Replayed(rank, size, recorded)
        assert run_on(worker, bundle, case, seed, tmp_path) == alone
        assert worker.left == []


def test_more_workers_than_points_are_refused(tiny: Tiny, seed: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="5 workers cannot share the 4 forward passes"):
        run_on(Replayed(0, 5, Recorded()), tiny("qwen3"), "mezo", seed, tmp_path)


@NEEDS_MPI
def test_processes_over_mpi_make_the_steps_of_one(tiny: Tiny, seed: int, tmp_path: Path) -> None:
    """Each process also makes them alone: BLAS may not round as in the process of the tests."""
    code = (
        "import json, sys; sys.path[:0] = ['tests', '.']\n"
        "from pathlib import Path\n"
        "from support.bundles import runnable\n"
        "from runtime.parallel.exchange import Alone\n"
        "from runtime.parallel.mpi import MpiExchange\n"
        "from tests.runtime.methods.test_workers import run_on\n"
        "bundle, seed, exchange = runnable(Path(sys.argv[1])), int(sys.argv[2]), MpiExchange()\n"
        "folder = Path(sys.argv[3]) / f'rank-{exchange.rank}'\n"
        "alone = run_on(Alone(), bundle, 'mezo', seed, folder)\n"
        "shared = run_on(exchange, bundle, 'mezo', seed, folder)\n"
        "print(json.dumps([exchange.size, alone, shared]) + '\\n', end='', flush=True)\n"
    )
    printed = two_processes(code, tiny("qwen3").path, seed, tmp_path)
    first, second = map(json.loads, printed)
    size, alone, together = first
    assert size == 2 and alone == together and first == second
