"""How long each method runs in a comparison, how often it is evaluated, and its forward passes.

A forward pass is one row through all blocks. Where a method runs backward, the row is computed
again, block by block, and the gradient of its activations costs about as many multiplications as a
third pass; the frozen weights have none. So such a row counts as three. Passes that a method makes
before its first step count too.
"""

from __future__ import annotations

from pathlib import Path

from harness.config.compare import EVAL_EVERY, CompareConfig, by_method, search_of
from runtime.config.methods import METHODS
from runtime.config.shared import StepConfig
from runtime.data.run_rows import TOKENS
from runtime.data.token_rows import count_rows
from runtime.methods.protocol import method as implementation
from runtime.methods.protocol import passes_before

UNBOUNDED_STEPS = 1_000_000  # where time ends a run
EVALUATIONS = 20  # at most, of a run, unless --eval-every is given
LAST_TRIAL = 4  # the run is so many times as long as the last trials of its sweep
PASSES_WITH_BACKWARD = 3  # forward, forward again, and the gradient


def passes_of_row(method: str) -> int:
    """How many forward passes a row counts for that a method runs through the model once."""
    step = StepConfig(bundle="any", method=method)
    demand = implementation(method).demand(step)
    return PASSES_WITH_BACKWARD if demand.backward else 1


def passes_of_step(config: CompareConfig, method: str) -> int:
    """The forward passes of one step."""
    demand = implementation(method).demand(_step(config, method))
    return demand.hidden_states * passes_of_row(method)


def first_passes(config: CompareConfig, method: str, run: Path | None = None) -> int:
    """The forward passes before the first step, at most; without a run, of data with enough rows.

    They follow from a run's settings and the number of its rows, so runs need not have written them
    down.
    """
    tokens = None if run is None else run / TOKENS[0]
    rows = None if tokens is None or not tokens.exists() else count_rows(tokens)
    return passes_before(_step(config, method), rows)


def _step(config: CompareConfig, method: str) -> StepConfig:
    queries = config.queries if "queries" in METHODS[method].options else None
    return StepConfig(bundle="any", method=method, batch_size=config.batch_size, queries=queries)


def step_limit(config: CompareConfig, method: str) -> int:
    """The most steps that `method` may take."""
    return _step_limit(config, method, first_passes(config, method))


def _step_limit(config: CompareConfig, method: str, before: int = 0) -> int:
    """The most steps after so many forward passes.

    Evaluations and sweeps are as long as without these, so that they come after round numbers.
    """
    limits = []
    if config.steps is not None:
        limits.append(by_method(config.steps, int)[method])
    if config.max_forward_passes:
        left = config.max_forward_passes - before
        limits.append(max(1, left // passes_of_step(config, method)))
    if limits:
        return min(limits)
    if config.max_seconds:
        return UNBOUNDED_STEPS
    return search_of(method).most_steps


def evaluated_every(config: CompareConfig, method: str) -> int:
    """The steps between evaluations."""
    if config.eval_every is not None:
        return by_method(config.eval_every, int)[method]
    if config.max_forward_passes:
        return -(-_step_limit(config, method) // EVALUATIONS)
    return EVAL_EVERY


def sweep_steps(config: CompareConfig, method: str, trials: int) -> list[int]:
    """The steps that trials have taken after each round of a sweep (successive halving).

    After each round the better half goes on, for twice as many steps, until one is left.
    """
    rounds = max(1, (trials - 1).bit_length())
    default = search_of(method).sweep_steps
    if config.sweep_steps is not None:
        first = by_method(config.sweep_steps, int).get(method, default)
    elif config.max_forward_passes:
        first = max(1, _step_limit(config, method) // (LAST_TRIAL << (rounds - 1)))
    else:
        first = default
    return [first << done for done in range(rounds)]
