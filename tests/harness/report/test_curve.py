"""Steps to quality: what counts as reached, and what it had taken by then."""

from __future__ import annotations

import pytest
from support.curves import curve_of, entry, evaluation

from harness.compare.trials import Trial, Tried, choose
from harness.report.curve import levels, make_curve


def test_what_was_spent_when_a_level_was_reached() -> None:
    curve = curve_of({"before": 5.0, "2": 4.0, "4": 4.5, "after": 3.0}, 6, passes=2)
    assert [point.step for point in curve.points] == [0, 2, 4, 6]
    first = curve.reached(4.2)
    assert first is not None
    assert (first.step, first.forward_passes, first.seconds, first.peak_bytes) == (2, 4, 4.0, 100)
    last = curve.reached(3.9)  # not between evaluations: at the first that shows it
    assert last is not None and (last.step, last.seconds) == (6, 12.0)
    assert curve.reached(2.9) is None
    assert curve.best.step == 6
    start = curve.reached(5.0)
    assert start is not None and (start.step, start.seconds, start.peak_bytes) == (0, 0.0, 0)


def test_peaks_of_resumed_runs_and_what_is_not_finite() -> None:
    entries = [entry(1, peak=100), entry(2, peak=300), entry(3, peak=50)]
    losses = {"before": 5.0, "2": float("nan"), "after": 4.0, "9": 1.0}
    curve = make_curve(entries, {when: evaluation(loss) for when, loss in losses.items()})
    assert [(p.step, p.peak_bytes) for p in curve.points] == [(0, 0), (3, 300)]
    assert curve.dropped == 1 and curve.peak_bytes == 300


def test_levels_lead_from_the_baseline_to_the_best() -> None:
    curves = {
        "mebp": curve_of({"before": 5.0, "after": 3.0}, 4),
        "mezo": curve_of({"before": 5.0, "2": 4.0, "after": 4.4}, 4),
    }
    found = levels(5.0, curves)
    assert [level.loss for level in found] == pytest.approx([4.5, 4.0, 3.5, 3.2, 3.0])
    assert found[1].meaning == "50% of the way, best of mezo"
    assert found[-1].meaning == "100% of the way, best of mebp"
    aimed = levels(5.0, curves, target=1.0)
    assert [level.loss for level in aimed] == pytest.approx([4, 3, 2, 1.4, 1])
    assert aimed[-1].meaning == "the target"
    worse = {"mebp": curve_of({"before": 5.0, "after": 5.5}, 4)}
    assert levels(5.0, worse) == [] == levels(5.0, worse, target=6.0)


def test_the_lowest_finite_loss_is_chosen() -> None:
    def tried(rate: float, loss: float | None) -> Tried:
        outcome = "finished" if loss is not None else "diverged"
        return Tried(Trial("mebp", {"learning_rate": rate}), outcome, "", 5.0, loss, 1.0)

    assert choose([tried(1, 4.0), tried(2, 3.0), tried(3, None)]) == 1
    assert choose([tried(1, 3.0), tried(2, 3.0)]) == 0
    assert choose([tried(1, None)]) is None
