"""The profile of a step: seconds of each kind of work, and time and peak memory of each block.

It is off by default, and then costs nothing. If it is on, MLX evaluates after each part, which
prevents some overlap; a profile therefore explains a step, but does not time it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass
class BlockUse:
    """Sums over all runs of one block."""

    visits: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    owners: dict[str, float] = field(default_factory=dict)


@dataclass
class Profile:
    """Collects measurements while `on`; `seconds` of a span exclude the spans inside it."""

    on: bool = False
    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)
    blocks: dict[tuple[str, str], BlockUse] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)
    _visited: BlockUse | None = None

    def span(self, owner: str) -> AbstractContextManager[None]:
        """Count the time inside under `owner`."""
        return self._span(owner) if self.on else nullcontext()

    def block(self, name: str, direction: str) -> AbstractContextManager[None]:
        """Count the time and the allocator's peak inside as one run of a block."""
        return self._block(name, direction) if self.on else nullcontext()

    def settle(self, *arrays: Any) -> None:
        """Evaluate now, so that the current span includes the time; does nothing while off."""
        if self.on:
            mx.eval(*arrays)

    @contextmanager
    def _span(self, owner: str) -> Iterator[None]:
        self._inner.append(0.0)
        start = self.clock()
        try:
            yield
        finally:
            whole = self.clock() - start
            inner = self._inner.pop()
            self.seconds[owner] = self.seconds.get(owner, 0.0) + whole - inner
            if self._visited is not None:
                owners = self._visited.owners
                owners[owner] = owners.get(owner, 0.0) + whole - inner
            if self._inner:
                self._inner[-1] += whole

    @contextmanager
    def _block(self, name: str, direction: str) -> Iterator[None]:
        use = self._visited = self.blocks.setdefault((name, direction), BlockUse())
        mx.reset_peak_memory()
        start = self.clock()
        try:
            yield
        finally:
            self._visited = None
            use.visits += 1
            use.seconds += self.clock() - start
            use.peak_bytes = max(use.peak_bytes, mx.get_peak_memory())

    def to_json(self, steps: int) -> dict[str, Any]:
        """Seconds a step per owner; per block seconds a step (also per owner) and peak bytes.

        Each block has separate figures for forward and backward.
        """
        names = list(dict.fromkeys(name for name, _ in self.blocks))
        return {
            "seconds_per_step": {name: value / steps for name, value in self.seconds.items()},
            "blocks": [
                {
                    "name": name,
                    **{
                        key: value
                        for direction in ("forward", "backward")
                        if (use := self.blocks.get((name, direction))) is not None
                        for key, value in (
                            (f"{direction}_s", use.seconds / steps),
                            (f"{direction}_peak_bytes", use.peak_bytes),
                            (
                                f"{direction}_owners_s",
                                {owner: value / steps for owner, value in use.owners.items()},
                            ),
                        )
                    },
                }
                for name in names
            ],
        }
