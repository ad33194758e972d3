"""What a terminal is shown of text from data, of progress, and of what follows it."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import pytest
from support.runs import Terminal, step_of

from harness.report.page_shell import page, paragraph
from harness.report.table import Table
from ondevice.cli import screen
from ondevice.cli.describe import GREEN, PLAIN, marked
from ondevice.cli.outcome import outcome_of
from ondevice.cli.progress import step_bar, task_bar
from runtime.core import signals
from runtime.core.control_characters import escaped
from runtime.core.errors import DataError
from runtime.core.notes import warning
from runtime.run.results import Step

ROW = "a\tb\nc\x1b[2J\x07\r\x9b31m\u202edoc\u2066x\x7f\u2028 \u00e9\u4f60\U0001f469\u200d\U0001f9b0"
SHOWN = (
    "a\tb\nc\\u001b[2J\\u0007\\u000d\\u009b31m\\u202edoc\\u2066x\\u007f\\u2028 "
    "\u00e9\u4f60\U0001f469\u200d\U0001f9b0"
)


class Lines(Terminal):
    """A terminal of 80 columns."""

    @property
    def lines(self) -> list[str]:
        """What stands there at the end, as far as `screen` draws."""
        return [line.rpartition("\x1b[2K\r")[2] for line in self.getvalue().split("\n")]


@contextlib.contextmanager
def shown_on() -> Iterator[Lines]:
    terminal = Lines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "_columns", lambda: 80)
        patch.setattr(screen, "REDRAWN_S", 0.0)
        for stream in ("stdout", "stderr"):
            patch.setattr(sys, stream, terminal)
        yield terminal


def test_a_terminal_is_shown_control_characters_and_a_pipe_gets_them() -> None:
    with shown_on() as terminal:
        assert escaped(ROW) == SHOWN
        screen.out(ROW)
        screen.note(ROW)
        assert terminal.getvalue() == f"{SHOWN}\n{SHOWN}\n"
        with contextlib.redirect_stdout(io.StringIO()) as pipe:
            screen.out(ROW)
        assert pipe.getvalue() == f"{ROW}\n"


def test_where_no_terminal_is_long_work_is_told_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: clock[0])
    work = [
        ("graphs", 5, 9, 20.0),  # ends before it is told
        *[("layers.0.weight", done * 10**6, 10**7, 12.0) for done in range(1, 8)],
        *[("tokenizing a: b.jsonl", done * 10**6, 10**7, 25.0) for done in range(1, 4)],
        ("evaluating (before)", 1, 2, 100.0),  # the time is that of what comes after it
        ("evaluating (50)", 1, 2, 100.0),
        ("evaluating (50)", 2, 2, 100.0),
        ("replaying", 1, 2_000_000, 100.0),
        ("replaying", 1_000_000, 2_000_000, 1.0),
    ]
    with contextlib.redirect_stderr(io.StringIO()) as pipe, task_bar() as show:
        for task, done, total, seconds in work:
            show(task, done, total)
            clock[0] += seconds
    assert pipe.getvalue().splitlines() == [
        "weights: 4 MB of 10 MB",
        "weights: 7 MB of 10 MB",
        "tokenizing a: b.jsonl: row 3,000,000 of 10,000,000",
        "evaluating (50): row 2 of 2",
        "replaying: step 1,000,000 of 2,000,000",
    ]


def test_an_error_that_quotes_a_row_is_shown_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise DataError(f"{ROW}.jsonl, line 1")

    monkeypatch.setattr(signals, "handle", lambda handler: {})
    with shown_on() as terminal:
        assert outcome_of(command) == 4
        assert terminal.getvalue() == f"ondevice: {SHOWN}.jsonl, line 1\n"


def test_a_row_cannot_colour_itself() -> None:
    with shown_on() as terminal:
        text, _ = marked([(f"no{GREEN}", False), ("yes", True)], colours=True)
        screen.out(text, coloured=True)
        assert terminal.getvalue() == f"no\\u001b[32m{GREEN}yes{PLAIN}\n"


def test_a_page_shows_them() -> None:
    rows = [(ROW, "x"), ("<b>", ROW)]
    html = page(ROW, [paragraph(ROW), Table(ROW, rows, left=2).html()])
    assert html.count(SHOWN) == 6 and "&lt;b&gt;" in html
    assert escaped(html) == html


LONG = {"loss": 12.3456, "seconds": 37.0, "tokens": 4000, "footprint_bytes": 93_400_000}
FOOTPRINT = "footprint 93.4 MB"


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (step_of(9990, **LONG), f"step 9990 of 10000, loss 12.346, {FOOTPRINT}, 6 min 10 s left"),
        (
            step_of(1000, **{**LONG, "loss": None}, objective=1.0),
            f"[#         ] step 1000 of 10000, loss not finite, 100% right, {FOOTPRINT}",
        ),
    ],
)
def test_progress_fits_80_columns_whole_and_keeps_the_footprint(one: Step, line: str) -> None:
    with shown_on() as terminal:
        with step_bar() as show:
            show(one, 10_000)
            assert terminal.lines == [line]
        assert terminal.lines == [""]


def test_a_bar_stands_where_there_is_room() -> None:
    assert screen.fitted(["rows: row 3 of 10", "x" * 70], 0.3, 79) == (
        "[###       ] rows: row 3 of 10"
    )
    assert screen.fitted(["name" * 50], 0.3, 79) == "name" * 19 + "nam"


def test_of_equal_warnings_a_command_says_the_first() -> None:
    def command() -> None:
        for text in (warning("hot"), "cold", warning("hot"), "cold", warning("wet")):
            screen.note(text)

    with shown_on() as terminal:
        for _ in range(2):
            assert outcome_of(command) == 0
    once = ["ondevice: warning: hot", "cold", "cold", "ondevice: warning: wet"]
    assert terminal.lines == [*once, *once, ""]


def test_nothing_shares_the_line_of_progress() -> None:
    with shown_on() as terminal:
        with task_bar() as evaluating, step_bar() as training:
            training(step_of(1, **LONG), 3)
            screen.note("a warning")
            evaluating("evaluating (1)", 1, 2)
            screen.note("step 1: loss 2")
            training(step_of(2, **LONG), 3)
            assert terminal.lines[:2] == ["a warning", "step 1: loss 2"]
            assert terminal.lines[2].startswith(f"step 2 of 3, loss 12.346, {FOOTPRINT}")
            evaluating("norm.weight", 500_000, 2_000_000)
            assert terminal.lines[2] == "[##        ] weights: 500 kB of 2 MB"
        screen.out("mebp: 3 steps")
        assert terminal.lines == ["a warning", "step 1: loss 2", "mebp: 3 steps", ""]
