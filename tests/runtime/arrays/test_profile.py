"""Profiles: what is counted under which owner and block, by a clock of their own."""

from __future__ import annotations

from itertools import count

from runtime.arrays.profile import Profile


def test_seconds_are_those_of_the_clock_and_exclude_inner_spans() -> None:
    ticks = count()
    profile = Profile(on=True, clock=lambda: float(next(ticks)))
    with profile.block("layer", "forward"), profile.span("outer"), profile.span("inner"):
        pass
    measured = profile.to_json(steps=2)
    assert measured["seconds_per_step"] == {"inner": 0.5, "outer": 1.0}
    (block,) = measured["blocks"]
    assert block["forward_s"] == 2.5  # six readings: five seconds
    assert block["forward_owners_s"] == {"inner": 0.5, "outer": 1.0}
    assert Profile().to_json(steps=1) == {"seconds_per_step": {}, "blocks": []}
