"""Signals that ask a process to end: handled, unless it was told to ignore them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from runtime.core.signals import ENDING, drop_terminal, handled, surviving_hangup


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_are_handled_and_given_back() -> None:
    def earlier(number: int, frame: object) -> None:
        pytest.fail("it was replaced")

    arrived: list[int] = []
    for number in ENDING:
        signal.signal(number, earlier)
    with handled(lambda number, frame: arrived.append(number)):
        for number in ENDING:
            signal.raise_signal(number)
    assert arrived == list(ENDING)
    assert all(signal.getsignal(number) is earlier for number in ENDING)


def test_what_nohup_ignores_stays_ignored() -> None:
    arrived: list[int] = []
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with handled(lambda number, frame: arrived.append(number)):
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert arrived == []


def test_output_that_is_no_terminal_is_kept() -> None:
    assert not drop_terminal()  # pytest's own
    with pytest.raises(OSError, match="full"), surviving_hangup():
        raise OSError("full")
