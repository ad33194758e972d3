"""Figures: every line of a comparison of all methods can be told from the others."""

from __future__ import annotations

from harness.report.figure import style
from runtime.config.methods import METHODS


def test_every_method_has_a_look_of_its_own() -> None:
    looks = {tuple(sorted(style(index).items())) for index in range(len(METHODS))}
    assert len(looks) == len(METHODS)
