"""The lines of metrics.jsonl: written and read as the same steps."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from runtime.core.errors import BundleError
from runtime.run.results import Step, final_loss, read_steps

STEP = Step(
    number=1,
    loss=2.5,
    learning_rate=1e-3,
    scored_tokens=3,
    tokens=8,
    forward_passes=2,
    seconds=0.5,
    footprint_bytes=10,
    peak_footprint_bytes=20,
    peak_rss_bytes=30,
)


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = [STEP, msgspec.structs.replace(STEP, number=2, loss=None, skipped=True)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(msgspec.to_builtins(step)) + "\n" for step in steps))
    assert list(read_steps(path, 2, "give up")) == steps


@pytest.mark.parametrize("tokens", ["9" * 5000, "-8", "8.5", '"8"', "null"])
def test_counts_that_are_none_are_refused(tmp_path: Path, tokens: str) -> None:
    line = json.dumps(msgspec.to_builtins(STEP)).replace('"tokens": 8', f'"tokens": {tokens}')
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(BundleError, match="damaged in line 1"):
        list(read_steps(path, 1, "give up"))


def test_one_step_does_not_decide_the_final_loss() -> None:
    assert final_loss([]) is None
    assert final_loss([3.0, 1.0]) == 2.0
    assert final_loss([90.0] * 5 + [1.0] * 9 + [11.0]) == 2.0
