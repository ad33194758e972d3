"""Callbacks by which the caller of a run can watch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.plan.plan import Plan
from runtime.run.evaluation import Evaluation
from runtime.run.metrics import Step


@dataclass
class Events:
    """The callbacks; each is optional.

    plan: receives the plan, once it is made. note: receives one line for people. step: receives a
    step and the number of all steps. evaluation: receives what is evaluated, the rows done, and the
    number of all rows. evaluated: receives when an evaluation was made ("before", a step's number,
    "after"), and what it found.
    """

    plan: Callable[[Plan], None] = lambda plan: None
    note: Callable[[str], None] = lambda text: None
    step: Callable[[Step, int], None] = lambda step, total: None
    evaluation: Callable[[str, int, int], None] = lambda what, done, total: None
    evaluated: Callable[[str, Evaluation], None] = lambda when, evaluation: None
