"""Numbers and times as people write them."""

from __future__ import annotations

import pytest

from runtime.core.units import format_number, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (1.155, "1.16 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (119.6, "2 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7_380.0, "2 h 03 min"),
    ],
)
def test_seconds_to_about_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0000123, "0.0000123"),
        (0.0251, "0.0251"),
        (1.0, "1"),
        (40.84, "40.8"),
        (999.4, "999"),
        (999.6, "1,000"),
        (1373, "1,373"),
    ],
)
def test_numbers_to_three_digits_or_more(value: float, text: str) -> None:
    assert format_number(value) == text
