"""What is said of training steps where stderr is no terminal: which lines, and what they hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.bundles import Tiny
from support.runs import step_of, train_arguments

from ondevice.cli.progress import LINE_SECONDS, LINE_STEPS, Steps
from runtime.run.results import Step


def lines(entries: list[Step], total: int) -> dict[int, str]:
    steps = Steps()
    told = {one.number: steps.line(one, total) for one in entries}
    return {step: line for step, line in told.items() if line}


def test_a_line_comes_first_at_each_tenth_step_and_last() -> None:
    found = lines([step_of(step) for step in range(4, 37)], 36)
    assert list(found) == [4, LINE_STEPS, 2 * LINE_STEPS, 3 * LINE_STEPS, 36]
    assert found[10] == (
        "step 10 of 36: loss 1.5000, learning rate 0.0003, 24 tokens/s (5 scored), footprint "
        "93 MB, 52.0 s left"
    )
    assert found[36].endswith("all steps done")


def test_long_steps_are_told_sooner() -> None:
    found = lines([step_of(step, seconds=LINE_SECONDS / 2) for step in range(1, 9)], 9)
    assert list(found) == [1, 3, 5, 7]


def test_a_line_has_the_means_since_the_line_before_it() -> None:
    losses = [9.0, 1.0, None, 3.0, *[2.0] * 6]
    seconds = [4.0, *[2.0] * 8, 20.0]
    entries = [step_of(i + 1, seconds=seconds[i], loss=losses[i]) for i in range(10)]
    found = lines(entries, 99)
    assert "loss 9.0000" in found[1] and "12 tokens/s (2 scored)" in found[1]
    assert "loss 2.0000" in found[10] and "12 tokens/s (2 scored)" in found[10]
    assert found[10].endswith("2 min 58 s left")  # 89 of the median step
    assert "loss not finite" in lines([step_of(1, loss=None)], 9)[1]


def test_the_time_of_all_steps_is_said_once_after_the_first_few() -> None:
    steps = Steps()
    said = []
    for step, seconds in enumerate([30.0, 1.0, 3.0, 5.0], 1):
        one = step_of(step, seconds=seconds)
        steps.line(one, 63)
        said.append(steps.estimate(one, 63))
    assert said == ["", "", "a step takes about 2.00 s: about 2 min 00 s for the 60 steps left", ""]


RUN = """
import sys
from ondevice.cli.main import main
code = main(sys.argv[1:])
unwanted = {"tqdm", "email", "importlib.metadata", "logging"} & set(sys.modules)
print("LOADED", sorted(unwanted), file=sys.stderr)
sys.exit(code)
"""


def test_without_a_terminal_nothing_is_loaded_to_draw_bars(tiny: Tiny, tmp_path: Path) -> None:
    words = train_arguments(tiny("qwen2").path, tmp_path / "run", 2)
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 2 of 2: loss" in done.stderr and "LOADED []" in done.stderr
