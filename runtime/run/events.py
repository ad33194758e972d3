"""What the caller of a run can watch while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.planner.plan import Plan


@dataclass
class Events:
    """Hooks; every one may be left alone.

    plan: the plan, once it is made. note: one line for people. step: a step's line of metrics.jsonl
    and how many steps there will be. evaluation: what is evaluated, rows done, rows in all.
    """

    plan: Callable[[Plan], None] = lambda plan: None
    note: Callable[[str], None] = lambda text: None
    step: Callable[[dict[str, Any], int], None] = lambda entry, total: None
    evaluation: Callable[[str, int, int], None] = lambda what, done, total: None
