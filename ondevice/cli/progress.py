"""Progress bars on stderr; nothing is shown where stderr is not a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ondevice.units import format_bytes

BYTES_FROM = 1_000_000  # a task with a total this large counts bytes; others count items


def _tqdm() -> Any:
    """tqdm with a lock of threads alone: its own brings in multiprocessing, and half a megabyte."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    return tqdm


@contextmanager
def task_bar(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Yields show(task, done, total): one bar at a time, a new one for each new task.

    Tasks that count bytes are all shown as the bar "weights".
    """
    tqdm = _tqdm()

    bars: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        in_bytes = total >= BYTES_FROM
        task = "weights" if in_bytes else what
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
                disable=None,
            )
        bars[task].update(done - bars[task].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


@contextmanager
def step_bar() -> Iterator[Callable[[dict[str, Any], int], None]]:
    """Yields show(entry, steps): the bar of training steps, with loss, speed and footprint.

    `entry` is the step's line of metrics.jsonl.
    """
    tqdm = _tqdm()

    bars: list[Any] = []

    def show(entry: dict[str, Any], total: int) -> None:
        if not bars:
            bars.append(
                tqdm(
                    total=total,
                    initial=entry["step"] - 1,
                    desc="training",
                    unit="step",
                    dynamic_ncols=True,
                    disable=None,
                )
            )
        loss = "not finite" if entry["loss"] is None else f"{entry['loss']:.3f}"
        bars[0].set_postfix_str(
            f"loss {loss}, {entry['tokens'] / entry['seconds']:.0f} tokens/s, "
            f"footprint {format_bytes(entry['footprint_bytes'])}",
            refresh=False,
        )
        bars[0].update(1)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()
