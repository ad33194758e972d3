"""Measured processes of `ondevice` that are forks, where a test is not about fresh ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.runs import ondevice

from harness.measure import command
from harness.measure.process import Ended, run

FRESH = ["-P", "-m", "ondevice"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of `ondevice` that the harness runs here are forks: see `support.forks`."""

    def forking(words: Sequence[str]) -> Ended:
        if list(words[1:4]) != FRESH:
            return run(words)  # another module, or with words before it
        done = ondevice(*words[4:])
        return Ended(done.returncode, done.stdout, done.stderr, interrupted=False)

    monkeypatch.setattr(command, "run", forking)
