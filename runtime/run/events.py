"""Callbacks by which the caller of a run can watch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.plan.plan import Plan


@dataclass
class Events:
    """The callbacks; each is optional.

    plan: receives the plan, once it is made. note: receives one line for people. step: receives a
    step's line of metrics.jsonl and the number of all steps. evaluation: receives what is
    evaluated, the rows done, and the number of all rows. evaluated: receives when an evaluation was
    made ("before", a step's number, "after"), and what it found, as evaluations.json holds it.
    """

    plan: Callable[[Plan], None] = lambda plan: None
    note: Callable[[str], None] = lambda text: None
    step: Callable[[dict[str, Any], int], None] = lambda entry, total: None
    evaluation: Callable[[str, int, int], None] = lambda what, done, total: None
    evaluated: Callable[[str, dict[str, Any]], None] = lambda when, found: None
