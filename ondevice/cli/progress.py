"""Progress on stderr: a line in a terminal, and lines of text for training steps elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ondevice.cli import screen
from runtime.core.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    from runtime.run.results import Step

LINE_STEPS = 10  # a line of text comes at each multiple of so many steps
LINE_SECONDS = 60.0  # and earlier, once so many seconds of training have passed without one
ESTIMATE_STEPS = 3  # after so many steps of a process, the time of all is estimated
# the units of tasks by their first words; every other task counts bytes, and is shown as "weights"
UNITS = {
    "tokenizing": "row", "reading": "row", "evaluating": "row", "comparing": "row",
    "replaying": "step", "graphs": "graph",
}  # fmt: skip


@contextmanager
def task_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yields show(task, done, total), which shows one task at a time; it is gone at the end."""

    def show(task: str, done: int, total: int) -> None:
        if unit := UNITS.get(task.split()[0]):
            said = f"{task}: {unit} {done:,} of {total:,}"
        else:
            said = f"weights: {format_bytes(done)} of {format_bytes(total)}"
        screen.progress([said], done / max(1, total))

    try:
        yield show
    finally:
        screen.progress()


class Steps:
    """The lines of text about a process's training steps."""

    def __init__(self) -> None:
        self._seconds: list[float] = []  # of every step of this process
        self._since: list[Step] = []  # the steps since the last line of text

    def line(self, step: Step, total: int) -> str:
        """A line of text if one is due after this step; it has means since the line before it."""
        first = not self._seconds
        self._seconds.append(step.seconds)
        self._since.append(step)
        seconds = sum(past.seconds for past in self._since)
        due = step.number % LINE_STEPS == 0 or step.number == total
        if not (first or due or seconds >= LINE_SECONDS):
            return ""
        losses = [past.loss for past in self._since if past.loss is not None]
        loss = f"{sum(losses) / len(losses):.4f}" if losses else "not finite"
        shares = [past.objective for past in self._since if past.objective is not None]
        right = f", {sum(shares) / len(shares):.1%} right" if shares else ""
        if idle := sum(past.learned is False for past in self._since):
            right += f", nothing learned in {idle} of {len(self._since)} steps"
        processed = sum(past.tokens for past in self._since) / seconds
        scored = sum(past.scored_tokens for past in self._since) / seconds
        self._since.clear()
        left = total - step.number
        eta = f"{format_seconds(left * self.step_s)} left" if left else "all steps done"
        return (
            f"step {step.number} of {total}: loss {loss}{right}, learning rate "
            f"{step.learning_rate:.3g}, {processed:.0f} tokens/s ({scored:.0f} scored), "
            f"footprint {format_bytes(step.footprint_bytes)}, {eta}"
        )

    @property
    def step_s(self) -> float:
        """The seconds that a step takes; the first one is left out as soon as there are others."""
        known = sorted(self._seconds[1:] or self._seconds)
        return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2  # the median

    def parts(self, step: Step, total: int) -> list[str]:
        """What a line of progress says of a step, the most important first."""
        loss = "not finite" if step.loss is None else f"{step.loss:.3f}"
        right = [] if step.objective is None else [f"{step.objective:.0%} right"]
        return [
            f"step {step.number} of {total}",
            f"loss {loss}",
            *right,
            f"footprint {format_bytes(step.footprint_bytes)}",
            f"{format_seconds((total - step.number) * self.step_s)} left",
            f"{step.tokens / step.seconds:.0f} tokens/s",
        ]

    def estimate(self, step: Step, total: int) -> str:
        """A sentence with the expected time, once after the first few steps of the process."""
        left = total - step.number
        if len(self._seconds) != ESTIMATE_STEPS or not left:
            return ""
        step_s = format_seconds(self.step_s)
        return (
            f"a step takes about {step_s}: about {format_seconds(left * self.step_s)} for the "
            f"{counted(left, 'step')} left"
        )


@contextmanager
def step_bar() -> Iterator[Callable[[Step, int], None]]:
    """Yields show(step, steps): a line of progress, or lines of text where there is no terminal."""
    steps = Steps()

    def show(step: Step, total: int) -> None:
        line = steps.line(step, total)
        if estimate := steps.estimate(step, total):
            screen.note(estimate)
        if sys.stderr.isatty():
            screen.progress(steps.parts(step, total), step.number / total)
        elif line:
            screen.note(line)

    try:
        yield show
    finally:
        screen.progress()
