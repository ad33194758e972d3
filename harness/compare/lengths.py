"""How long each method runs in a comparison, and how often it is evaluated."""

from __future__ import annotations

from harness.config.compare import EVAL_EVERY, CompareConfig, by_method, search_of

UNBOUNDED_STEPS = 1_000_000  # where time ends a run


def step_limit(config: CompareConfig, method: str) -> int:
    """The most steps that `method` may take."""
    if config.steps is not None:
        return by_method(config.steps, int)[method]
    return UNBOUNDED_STEPS if config.max_seconds else search_of(method).most_steps


def evaluated_every(config: CompareConfig, method: str) -> int:
    """The steps between evaluations."""
    return EVAL_EVERY if config.eval_every is None else by_method(config.eval_every, int)[method]


def sweep_steps(config: CompareConfig, method: str, trials: int) -> list[int]:
    """The steps that trials have taken after each round of a sweep (successive halving).

    After each round the better half goes on, for twice as many steps, until one is left.
    """
    rounds = max(1, (trials - 1).bit_length())
    first = search_of(method).sweep_steps
    if config.sweep_steps is not None:
        first = by_method(config.sweep_steps, int).get(method, first)
    return [first << done for done in range(rounds)]
