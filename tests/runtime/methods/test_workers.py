"""Workers that share out a step make a single worker's: zeroth-order methods bit for bit.

MLX binds a graph to one thread, so the workers of a process run one after the other. In a
zeroth-order step each gets what a single worker's run has gathered, after the part that it must
have computed itself is compared.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from support import full_weights as whole
from support.bundles import Rng, Tiny
from support.estimators import OPTIONS, config_of, rows_of, started
from support.exchange import NEEDS_MPI, in_turn, processes
from support.lengths import at_length
from support.lora import with_lora
from support.models import Kept, adapters_of, agree, mebp_of, model_of, relative, row_of
from support.pair_loss import PairLoss
from support.plans import LINUX
from support.slices import held

from runtime.bundle.store import Bundle
from runtime.core.errors import UsageError
from runtime.methods import protocol
from runtime.methods.adapters import Adapters
from runtime.methods.clipping import Clipping
from runtime.methods.mebp import MeBP
from runtime.methods.optimizer import Optimizer
from runtime.methods.protocol import StepResult
from runtime.methods.zeroth.zeroth_order import ZerothOrder
from runtime.objectives.accuracy import Accuracy
from runtime.objectives.next_token import NextToken
from runtime.objectives.objective import Objective, Scored
from runtime.parallel.exchange import Alone, Exchange
from runtime.parallel.workers import Workers
from runtime.plan.demand import Demand
from runtime.plan.planner import Planner
from runtime.run.budget import training
from runtime.storage.activations import Activations

TILES = {"tile_values": 10**6, "chunk_rows": 2000}
STEPS = 2


class Even(Accuracy):
    """Calls a token right if the most likely one is even, so that some are."""

    def right(self, sample: Scored) -> int:
        return int(np.count_nonzero(np.array(sample.head.predicted) % 2 == 0))


class Case(NamedTuple):
    """A method's options, its objective, and the rows of a step."""

    options: dict[str, Any]
    objective: Objective = NextToken()
    rows: int = 3  # of which two workers cannot have as many each


CASES = {
    "mezo": Case({}),
    **{case: Case({**options, "queries": 1}) for case, options in OPTIONS.items()},
    "fzoo": Case({"queries": 2}),
    "one-point": Case({"queries": 2}),
    "share": Case({"method": "mezo", "epsilon": 0.5}, Even()),
    "pairs": Case({"method": "mezo"}, PairLoss(), rows=4),
    "full": Case({}),
}
SIBLINGS = ("kzoo", "momentum", "parameter-norm", "gradient-norm")  # which no other code shares out
GRIDS: list[dict[str, Any]] = [
    {"data": 2, "perturb": 2},
    {"data": 2, "speeds": (1.0, 2.0)},
    {"perturb": 2},
    {"data": 3},
]


class Recorded(Alone):
    """A single worker, and all that it has gathered."""

    def __init__(self) -> None:
        self.gathered: list[list[float]] = []

    def gather(self, values: Sequence[float], counts: Sequence[int]) -> list[float]:
        self.gathered.append(super().gather(values, counts))
        return self.gathered[-1]


class Replayed(Exchange):
    """One of several workers, whose others are those of a record: see `workers_of`."""

    def __init__(self, rank: int, size: int, case: Case, recorded: Recorded) -> None:
        self.rank, self.size, self.case = rank, size, case
        self.left = list(recorded.gathered)
        self.workers: Workers

    def _all_bytes(self, message: bytes) -> list[bytes]:
        raise NotImplementedError

    def gather(self, values: Sequence[float], counts: Sequence[int]) -> list[float]:
        together = self.case.objective.together
        groups, each = self.case.rows // together, together + 1
        recorded = np.array(self.left.pop(0)).reshape(-1, groups, each)  # by point and group
        of_workers = [
            recorded[portion.points][:, portion.groups].reshape(-1)
            for portion in self.workers.portions(groups, len(recorded))
        ]
        assert [*map(len, of_workers)] == counts
        assert struct.pack(f"{len(values)}d", *values) == of_workers[self.rank].tobytes()
        return [float(value) for of_worker in of_workers for value in of_worker]


def workers_of(case: Case, recorded: Recorded, grid: dict[str, Any]) -> list[Workers]:
    """All workers of a grid."""
    size = grid.get("data", 1) * grid.get("perturb", 1)
    found = []
    for rank in range(size):
        exchange = Replayed(rank, size, case, recorded)
        exchange.workers = Workers(exchange, **grid)
        found.append(exchange.workers)
    return found


Digest = Callable[[], dict[str, bytes]]
Built = tuple[ZerothOrder, Digest]


def with_adapters(
    workers: Workers, bundle: Bundle, case: str, rng: Rng, seed: int, folder: Path
) -> Built:
    """A method that trains adapters, and their bytes."""
    model, adapters = model_of(bundle, 16, **TILES), adapters_of(bundle, rng)
    if case == "zo-act":
        adapters = Adapters.initial(bundle.manifest, seed)
    rows = CASES[case].rows
    lanes = 2 + workers.exchange.rank  # the hidden states beside it change no loss
    config = config_of(case, seed, **CASES[case].options)
    method = started(config, model, adapters, folder, rows, lanes, workers=workers)
    objective = CASES[case].objective
    method = replace(method, objective=objective)
    if objective.together > 1:  # it started with slots for the rows that others would give it
        slots = len(method.estimator.lanes(rows))
        shape = (1, model.bucket, bundle.manifest.hidden_size)
        method = replace(method, activations=Activations(folder, 1, slots, shape))
    tensors = adapters.tensors
    return method, lambda: {name: np.array(tensors[name]).tobytes() for name in tensors}


def with_weights(workers: Workers, bundle: Bundle, seed: int, folder: Path) -> Built:
    """A method that trains all weights, and their bytes."""
    weights = whole.weights_of(bundle, folder / "slots", seed)
    model = model_of(bundle, 16, weights=weights, **TILES)
    method = whole.method_of(model, weights, folder, CASES["full"].rows)
    return replace(method, workers=workers), lambda: whole.all_of(weights)


def run_on(workers: Workers, bundle: Bundle, case: str, seed: int, folder: Path) -> list[Any]:
    """The steps' records and results, and the SHA-256 of what is trained after them."""
    rng = np.random.default_rng(seed)
    own = folder / f"{workers.exchange.rank}-{workers.data}-{workers.perturb}-{workers.speeds}"
    own.mkdir(parents=True)
    if case == "full":
        method, digest = with_weights(workers, bundle, seed, own)
    else:
        method, digest = with_adapters(workers, bundle, case, rng, seed, own)
    results: list[Any] = []
    for step in range(STEPS):
        rows = rows_of(bundle, rng, CASES[case].rows)
        result = method.step(step, 1e-5, [rows[:2], rows[2:]])
        assert result.skipped == 0
        loss = [result.loss.loss_sum, result.loss.scored_tokens]
        results.append([result.record, loss, result.forward_passes, dict(result.shown)])
    # the share of a few tokens may be the same at both points
    assert case == "share" or results[-1][0][1][0] != 0, "nothing was learnt"
    method.settle()
    return [*results, sha256(b"".join(digest().values())).hexdigest()]


@at_length("grids", 1, len(GRIDS))
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SIBLINGS else c for c in CASES]
)
def test_workers_make_the_steps_of_one(
    tiny: Tiny, seed: int, case: str, grids: int, tmp_path: Path
) -> None:
    """By rows, by points and by both, also where they cannot share these evenly."""
    recorded = Recorded()
    bundle = whole.full(tiny, "qwen3", "float32") if case == "full" else tiny("qwen3")
    alone = run_on(Workers(recorded), bundle, case, seed, tmp_path)
    grids = len(GRIDS) if case == "mezo" else grids - (case == "pairs" and grids > 1)
    for grid in GRIDS[:grids]:
        first, *others, last = workers_of(CASES[case], recorded, grid)
        for workers in (first, *(others if case == "mezo" else ()), last):
            assert run_on(workers, bundle, case, seed, tmp_path) == alone
            assert isinstance(workers.exchange, Replayed) and workers.exchange.left == []


@pytest.mark.parametrize(
    ("method", "grid", "message"),
    [
        ("mezo", {"data": 4}, "data=4: .* the 3 rows of a step"),
        ("mezo", {"perturb": 4}, "perturb=4: .* the 2 forward passes"),
        ("mebp", {"data": 4}, "data=4: .* the 3 rows of a step"),
        ("mebp", {"data": 2, "perturb": 2}, "perturb=2: mebp runs each row .* give data=4"),
    ],
)
def test_more_workers_than_work_are_refused(
    tiny: Tiny, seed: int, tmp_path: Path, method: str, grid: dict[str, int], message: str
) -> None:
    workers, bundle = workers_of(CASES["mezo"], Recorded(), grid)[0], tiny("qwen3")
    adapters = Adapters(bundle.manifest, {})
    with pytest.raises(UsageError, match=message):
        started(
            config_of(method, seed), model_of(bundle, 16), adapters, tmp_path, 3, 2, workers=workers
        )


def test_a_method_that_cannot_be_shared_is_refused(
    tiny: Tiny, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, bundle = workers_of(CASES["mezo"], Recorded(), {"data": 2})[0], tiny("qwen3")
    adapters, other = Adapters(bundle.manifest, {}), SimpleNamespace(demand=lambda config: Demand())
    monkeypatch.setattr(protocol, "method", lambda name: other)
    with pytest.raises(UsageError, match="2 workers are there, and a step of mezo cannot be share"):
        started(
            config_of("mezo", seed), model_of(bundle, 16), adapters, tmp_path, 3, 2, workers=workers
        )


SHARED: dict[str, dict[str, Any]] = {
    "rows": {},
    "uneven": {"data": 3, "rows": [4], "kept": 1},
    "accumulation": {"rows": [1, 1, 1]},
    "clipping and dropout": {"rows": [2, 2, 1], "most": 1e-3, "dropout": 0.5},
    "pairs": {"rows": [4, 2], "loss": PairLoss()},
}


def backpropagated(
    exchange: Exchange, bundle: Bundle, seed: int, folder: Path, **case: Any
) -> tuple[dict[str, mx.array], StepResult]:
    """The gradients that a step's optimizer gets, and the step's result."""
    rng, data = np.random.default_rng(seed), case.get("data", 2)
    lora = bundle.manifest.lora
    bundle = bundle.with_lora(msgspec.structs.replace(lora, dropout=case.get("dropout", 0.0)))
    model, adapters = model_of(bundle, 16, **TILES), adapters_of(bundle, rng)
    parts = [rows_of(bundle, rng, count) for count in case.get("rows", [2])]
    kept, most = Kept(), case.get("most", 0.0)
    method = mebp_of(
        model, adapters, kept, folder, max(map(len, parts)),
        kept=[case.get("kept", 0)],
        clipping=Clipping(adapters, most, folder) if most else None,
        seed=seed,
        loss=case.get("loss", NextToken()),
        workers=Workers(exchange, data=1 if exchange.size == 1 else data),
    )  # fmt: skip
    return kept.found, method.step(0, 1e-3, parts)


@pytest.mark.parametrize("case", [*SHARED])
def test_workers_add_up_the_gradients_of_one(
    tiny: Tiny, seed: int, case: str, tmp_path: Path
) -> None:
    """All have the same bits, those of a single worker but for the order of the sum."""
    bundle, options = tiny("qwen3"), SHARED[case]
    alone, expected = backpropagated(Alone(), bundle, seed, tmp_path, **options)
    of_workers = in_turn(
        options.get("data", 2),
        lambda exchange: backpropagated(exchange, bundle, seed, tmp_path, **options),
    )
    for found, result in of_workers:
        agree(found, alone, 1e-6)
        assert all(mx.array_equal(found[name], of_workers[0][0][name]) for name in found)
        assert result == of_workers[0][1]
        assert result.loss.loss_sum == pytest.approx(expected.loss.loss_sum, rel=1e-6)
        assert result.loss.objective_sum == pytest.approx(expected.loss.objective_sum, rel=1e-6)
        assert result.loss.scored_tokens == expected.loss.scored_tokens
        assert result.forward_passes == expected.forward_passes
        assert (result.gradient_norm is None) == ("most" not in options)
        if expected.gradient_norm is not None:
            assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-6)


def test_the_plan_counts_gradients_that_are_being_summed(tiny: Tiny) -> None:
    """What a worker has sent of a layer, and the sum; a head's gradients are summed in place."""
    manifest = with_lora(tiny("llama"), targets=("q_proj", "lm_head")).manifest
    largest = max(
        sum(4 * a * b for a, b in manifest.adapter_shapes(block).values())
        for block in manifest.layers
    )
    for method, more in (("mebp", 2 * largest), ("mezo", 0)):
        one, several = (
            Planner(manifest, LINUX).plan(training(config_of(method, 0), manifest, workers), 10**9)
            for workers in (1, 2)
        )
        assert several.gradient_bytes - one.gradient_bytes == more


LONG = (5, 9, 27, 14)  # rows of which two workers have no bucket in common


def trained_on(
    workers: Workers, bundle: Bundle, seed: int, folder: Path, steps: int, rows: int
) -> tuple[list[float], np.ndarray]:  # type: ignore[type-arg]
    """The losses of MeBP's steps, and all values of the adapters after them."""
    rng = np.random.default_rng(seed)
    own = folder / f"mebp-{workers.exchange.rank}-{workers.data}"
    own.mkdir(parents=True)
    short, long = (model_of(bundle, bucket, **TILES) for bucket in (16, 32))
    adapters = adapters_of(bundle, rng)
    method = MeBP(
        lambda length: short if length <= 16 else long,
        adapters,
        Activations(own, len(long.blocks), rows, (1, 32, bundle.manifest.hidden_size)),
        Optimizer(adapters, "adamw", 0.01, own),
        clipping=Clipping(adapters, 1.0, own),
        workers=workers,
    )
    losses = []
    for step in range(steps):
        part = [row_of(bundle, rng, length) for length in LONG[:rows]]
        result = method.step(step, 1e-3, [part])
        losses.append(result.loss.loss_sum)
    return losses, np.concatenate([np.array(v).reshape(-1) for v in adapters.tensors.values()])


def compared(exchange: Exchange, bundle: Bundle, seed: int, folder: Path, steps: int) -> list[Any]:
    """What MeBP's steps among workers come to: a digest, bytes sent a step, and distances.

    The distances from a single worker's are relative: of a step's gradients, of the losses, and of
    the adapters.
    """
    several, rows = Workers(exchange, data=exchange.size), max(3, exchange.size)
    before = exchange.sent_bytes
    losses, adapters = trained_on(several, bundle, seed, folder, steps, rows)
    sent = (exchange.sent_bytes - before) // steps
    of_one, expected = trained_on(Workers(), bundle, seed, folder / "alone", steps, rows)
    first, first_of_one = (
        backpropagated(of, bundle, seed, folder, rows=[rows], data=exchange.size)[0]
        for of in (exchange, Alone())
    )
    distances = [
        max(relative(np.array(first[name]), np.array(first_of_one[name])) for name in first),
        max(abs(a - b) / b for a, b in zip(losses, of_one, strict=True)),
        relative(adapters, expected),
    ]
    return [sha256(adapters.tobytes()).hexdigest(), sent, *distances]


@NEEDS_MPI
@pytest.mark.parametrize(
    ("size", "steps"),
    [(2, 2), *(pytest.param(size, 50, marks=pytest.mark.slow) for size in (2, 4))],
)
def test_processes_over_mpi_make_the_steps_of_one(
    tiny: Tiny, seed: int, tmp_path: Path, size: int, steps: int
) -> None:
    """Each process also makes them alone: BLAS may not round as in the process of the tests."""
    code = (
        "import json, sys; sys.path[:0] = ['tests', '.']\n"
        "from pathlib import Path\n"
        "from support.bundles import runnable\n"
        "from runtime.parallel.mpi import MpiExchange\n"
        "from runtime.parallel.workers import Workers\n"
        "from tests.runtime.methods.test_workers import compared, run_on\n"
        "bundle, exchange = runnable(Path(sys.argv[1])), MpiExchange()\n"
        "seed, steps = map(int, sys.argv[2:4])\n"
        "folder = Path(sys.argv[4]) / f'rank-{exchange.rank}'\n"
        "alone = run_on(Workers(), bundle, 'mezo', seed, folder)\n"
        "grid = {'data': 2, 'perturb': exchange.size // 2}\n"
        "shared = run_on(Workers(exchange, **grid), bundle, 'mezo', seed, folder)\n"
        "mebp = compared(exchange, bundle, seed, folder, steps)\n"
        "print(json.dumps([exchange.size, alone, shared, mebp]) + '\\n', end='', flush=True)\n"
    )
    printed = processes(size, code, tiny("qwen3").path, seed, steps, tmp_path)
    first, *others = map(json.loads, printed)
    counted, alone, together, (_, sent, *distances) = first
    print(f"{size} processes, MeBP, {steps} steps: {sent} bytes a step; gradients, losses and "
          f"adapters are {distances} from those of one")  # fmt: skip
    assert counted == size and alone == together and others == [first] * (size - 1)
    assert max(distances) <= 1e-6


@pytest.mark.parametrize("method", ["mezo", "mebp"])
def test_a_step_on_slices_has_the_bits_of_a_step_on_the_whole(
    tiny: Tiny, seed: int, tmp_path: Path, method: str
) -> None:
    def step(bundle: Bundle, folder: Path) -> object:
        if method == "mezo":
            return run_on(Workers(), bundle, method, seed, folder)
        folder.mkdir()
        gradients, result = backpropagated(Alone(), bundle, seed, folder)
        return {name: np.array(each).tobytes() for name, each in gradients.items()}, result.loss

    bundle = tiny("qwen3")
    with held(bundle, tmp_path / "slices", [1, 2]) as bundles:
        made = [step(each, tmp_path / f"worker-{i}") for i, each in enumerate(bundles)]
    assert made == [step(bundle, tmp_path / "alone")] * 2
