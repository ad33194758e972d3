"""How long each method runs in a comparison, how often it is evaluated, and its forward passes.

A forward pass is one row through all blocks. Where a method runs backward, the row is computed
again, block by block, and the gradient of its activations costs about as many multiplications as a
third pass; the frozen weights have none. So such a row counts as three.
"""

from __future__ import annotations

from ondevice.config.compare import EVAL_EVERY, CompareConfig, by_method
from ondevice.config.shared import StepConfig
from ondevice.methods import OPTIONS_OF, SEARCHES, Search
from runtime.methods.registry import method as implementation

UNBOUNDED_STEPS = 1_000_000  # where time ends a run
EVALUATIONS = 20  # at most, of a run, unless --eval-every is given
LAST_TRIAL = 4  # the run is so many times as long as the last trials of its sweep
PASSES_WITH_BACKWARD = 3  # forward, forward again, and the gradient
_NO_SEARCH = Search()


def passes_of_row(method: str) -> int:
    """How many forward passes a row counts for that a method runs through the model once."""
    step = StepConfig(bundle="any", method=method, batch_size=2)  # some need more than one row
    demand = implementation(method).demand(step)
    return PASSES_WITH_BACKWARD if demand.backward else 1


def passes_of_step(config: CompareConfig, method: str) -> int:
    """The forward passes of one step."""
    queries = config.queries if method in OPTIONS_OF["queries"] else None
    step = StepConfig(bundle="any", method=method, batch_size=config.batch_size, queries=queries)
    return implementation(method).demand(step).hidden_states * passes_of_row(method)


def step_limit(config: CompareConfig, method: str) -> int:
    """The most steps that `method` may take."""
    limits = []
    if config.steps is not None:
        limits.append(by_method(config.steps, int)[method])
    if config.max_forward_passes:
        limits.append(max(1, config.max_forward_passes // passes_of_step(config, method)))
    if limits:
        return min(limits)
    if config.max_seconds:
        return UNBOUNDED_STEPS
    return SEARCHES.get(method, _NO_SEARCH).most_steps


def evaluated_every(config: CompareConfig, method: str) -> int:
    """The steps between evaluations."""
    if config.eval_every is not None:
        return by_method(config.eval_every, int)[method]
    if config.max_forward_passes:
        return -(-step_limit(config, method) // EVALUATIONS)
    return EVAL_EVERY


def sweep_steps(config: CompareConfig, method: str, trials: int) -> list[int]:
    """The steps that trials have taken after each round of a sweep (successive halving).

    After each round the better half goes on, for twice as many steps, until one is left.
    """
    rounds = max(1, (trials - 1).bit_length())
    default = SEARCHES.get(method, _NO_SEARCH).sweep_steps
    if config.sweep_steps is not None:
        first = by_method(config.sweep_steps, int).get(method, default)
    elif config.max_forward_passes:
        first = max(1, step_limit(config, method) // (LAST_TRIAL << (rounds - 1)))
    else:
        first = default
    return [first << done for done in range(rounds)]
