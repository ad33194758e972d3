"""Progress on stderr: bars in a terminal, and lines of text for training steps elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runtime.core.signals import surviving_hangup
from runtime.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from runtime.run.results import Step

LINE_STEPS = 10  # a line of text comes at each multiple of so many steps
LINE_SECONDS = 60.0  # and earlier, once so many seconds of training have passed without one
ESTIMATE_STEPS = 3  # after so many steps of a process, the time of all is estimated
BYTES_FROM = 1_000_000  # a task with a total this large counts bytes; others count items


def _tqdm() -> Any:
    """tqdm, for a terminal only: elsewhere nothing is drawn, and its import takes more than 1 MB.

    Its lock is of threads alone: its own brings in multiprocessing, and half a megabyte.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    return tqdm


@contextmanager
def task_bar(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields show(task, done, total): one bar at a time, a new one for each new task.

    Tasks that count bytes are all shown as the bar "weights". Where there is no terminal, nothing
    is shown.
    """
    if not sys.stderr.isatty():
        yield lambda task, done, total: None
        return
    tqdm = _tqdm()
    bars: dict[str, Any] = {}

    @surviving_hangup()
    def show(task: str, done: int, total: int) -> None:
        in_bytes = total >= BYTES_FROM
        if in_bytes:
            task = "weights"
        if task not in bars:
            for bar in bars.values():
                bar.close()
            bars[task] = tqdm(
                total=total,
                desc=task,
                unit="B" if in_bytes else unit,
                unit_scale=in_bytes,
                leave=False,
                dynamic_ncols=True,
            )
        bars[task].update(done - bars[task].n)

    try:
        yield show
    finally:
        with surviving_hangup():
            for bar in bars.values():
                bar.close()


@surviving_hangup()
def say(text: str) -> None:
    """Print a line on stderr, above the bars that are shown there."""
    if sys.stderr.isatty():
        _tqdm().write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)
    sys.stderr.flush()


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

    def estimate(self, step: Step, total: int) -> str:
        """A sentence with the expected time, once after the first few steps of the process."""
        left = total - step.number
        if len(self._seconds) != ESTIMATE_STEPS or not left:
            return ""
        step_s = format_seconds(self.step_s)
        steps = "1 step" if left == 1 else f"{left} steps"
        return (
            f"a step takes about {step_s}: about {format_seconds(left * self.step_s)} for the "
            f"{steps} left"
        )


@contextmanager
def step_bar() -> Iterator[Callable[[Step, int], None]]:
    """Yields show(step, steps): a bar of training steps, or lines where there is no terminal."""
    tqdm = _tqdm() if sys.stderr.isatty() else None  # now, so that a plan counts its memory
    bars: list[Any] = []
    steps = Steps()

    @surviving_hangup()
    def show(step: Step, total: int) -> None:
        line = steps.line(step, total)
        estimate = steps.estimate(step, total)
        if estimate:
            say(estimate)
        if tqdm is None:
            if line:
                say(line)
            return
        if not bars:
            bars.append(
                tqdm(
                    total=total,
                    initial=step.number - 1,
                    desc="training",
                    unit="step",
                    dynamic_ncols=True,
                )
            )
        loss = "not finite" if step.loss is None else f"{step.loss:.3f}"
        right = f", {step.objective:.0%} right" if step.objective is not None else ""
        processed, scored = step.tokens / step.seconds, step.scored_tokens / step.seconds
        bars[0].set_postfix_str(
            f"loss {loss}{right}, {processed:.0f} tokens/s ({scored:.0f} scored), "
            f"footprint {format_bytes(step.footprint_bytes)}",
            refresh=False,
        )
        bars[0].update(1)

    try:
        yield show
    finally:
        with surviving_hangup():
            for bar in bars:
                bar.close()
