"""JSON of a type: the place and the value that a refusal names."""

from __future__ import annotations

import re

import msgspec
import pytest

from runtime.core.typed import decoded


class Measured(msgspec.Struct):
    """A value of the type below."""

    loss: float


class Content(msgspec.Struct):
    """A type with objects whose keys are free."""

    measured: dict[str, Measured | None] = {}
    inner: dict[str, dict[str, int]] = {}
    count: int = 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"measured": {"a": null, "b": {"loss": "x"}}, "count": "y"}', "b.loss`, which is 'x'"),
        ('{"inner": {"a": {"b": 1}, "c": {"d": 1, "e": "x"}, "f": {"g": "y"}}}', "c.e`, which is"),
        ('{"measured": {"a": {"loss": 1e999}}}', "out of range - at `$.measured[...].loss`"),
        ('{"measured": {"a": {"loss": "x"}, "a": {"loss": 1}}}', "`$.measured[...].loss`"),
        ('{"count": "x", "count": 1}', "Expected `int`, got `str` - at `$.count`"),
    ],
)
def test_the_first_wrong_value_is_named_where_others_are_wrong_too(data: str, said: str) -> None:
    """Where none can be told, as of two values with one key, its place alone is."""
    with pytest.raises(ValueError, match=re.escape(said)):
        decoded(data.encode(), Content)
