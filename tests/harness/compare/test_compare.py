"""Comparisons: curves and levels, resuming, refusals, the page and its verdict, one for real."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from support.bundles import Tiny
from support.comparisons import Runs, by_rate, curve_of, entry, evaluation, settings
from support.runs import ondevice, refuses, succeeds

from harness.compare.compare import compare
from harness.compare.lengths import step_limit
from harness.compare.notes import notes
from harness.compare.report import tables, to_text
from harness.compare.trials import Finding, Trial, Tried, choose, grid
from harness.compare.verdict import verdict
from harness.config.compare import CompareConfig, by_method, search_of
from harness.measure import command, process
from harness.measure.training import measure_training
from harness.report.curve import levels, make_curve, read_curve
from runtime.config import arguments
from runtime.config import base as config
from runtime.config.base import load
from runtime.config.methods import METHODS
from runtime.core.errors import (
    BudgetError,
    BundleError,
    DivergedError,
    InterruptedRunError,
    OnDeviceError,
    UsageError,
)

# --- configuration ----------------------------------------------------------------------------


def test_numbers_by_method() -> None:
    assert by_method("5", int) == dict.fromkeys(METHODS, 5)
    assert by_method("mebp=5, mezo=40", int) == {"mebp": 5, "mezo": 40}
    for wrong in ("", "mebp", "mebp=x", "mebp=1,mebp=2", "adam=3", "5,6"):
        with pytest.raises(ValueError):
            by_method(wrong, int)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"steps": None}, "nothing ends it"),
        ({"steps": "mebp=4"}, "a number for mezo"),
        ({"steps": "0"}, "1 or more for each method"),
        ({"methods": "mebp,adam"}, "each once"),
        ({"methods": "mezo,mezo"}, "each once"),
        ({"learning_rates": "mezo=1e-3:1e-4"}, "larger than the one before"),
        ({"epsilons": "0"}, "above 0"),
    ],
)
def test_settings_are_checked(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings(tmp_path, **more)


def test_flags_and_files_hold_every_setting(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    arguments.add_arguments(parser, CompareConfig)
    typed = [
        "b",
        "--data=d",
        "--steps=mebp=5,mezo=9",
        "--epsilons=1e-3:0.01",
        "--learning-rates=mebp=2e-4",
        "--queries=2",
    ]
    made = config.load(
        CompareConfig, None, arguments.given(parser.parse_args(typed), CompareConfig)
    )
    assert made.method_names == ("mebp", "mezo")
    assert made.searched("mebp") == {"learning_rate": (2e-4,)}  # it has no epsilon
    rates = search_of("mezo").values["learning_rate"]  # not named, so as they are by default
    assert made.searched("mezo") == {"learning_rate": rates, "epsilon": (0.001, 0.01)}
    (tmp_path / "c.toml").write_text(config.to_toml(made))
    assert config.load(CompareConfig, tmp_path / "c.toml", {}) == made
    for one in fields(CompareConfig):
        assert one.metadata["help"]


def test_bounds(tmp_path: Path) -> None:
    assert step_limit(settings(tmp_path, steps="mebp=4,mezo=9"), "mezo") == 9
    assert step_limit(settings(tmp_path, steps=None, max_seconds=9.0), "mebp") == 1_000_000
    assert step_limit(settings(tmp_path, steps=None, target_loss=3.0), "mezo") == 100_000
    pairs = grid(settings(tmp_path, epsilons="1e-3:1e-2"), "mezo")
    assert len(pairs) == 6 == len({trial.name for trial in pairs})


# --- comparisons with runs that are made up ---------------------------------------------------


def test_all_that_was_tried_is_kept(tmp_path: Path) -> None:
    runs, notes = Runs(by_rate), list[str]()
    given = settings(tmp_path, learning_rates="mezo=1e-5", target_loss=1.5)
    report = compare(given, notes.append, runs)
    out = tmp_path / "out"
    assert report == json.loads((out / "compare.json").read_text())
    tried = report["sweep"]["mebp"]["tried"]
    assert [one["outcome"] for one in tried] == ["finished", "finished", "diverged"]
    assert "step 2 is nan" in tried[2]["reason"]
    assert report["sweep"]["mebp"]["chosen"] == 1
    assert report["methods"]["mebp"]["trial"]["values"] == {"learning_rate": 3e-4}
    assert "mezo" not in report["sweep"]
    assert report["levels"][-1]["reached"] == {"mebp": None, "mezo": None}
    text = to_text(report)
    assert (out / "compare.txt").read_text() == text + "\n"
    assert "not reached" in text and "the target" in text
    assert report["verdict"] in text and "No method reached a loss of 1.5" in report["verdict"]
    assert escape(report["verdict"]) in (out / "compare.html").read_text()
    assert "is the largest that was" not in text  # what is beyond the best rate has diverged
    assert str(tmp_path) not in json.dumps(report)
    assert "sweep 3 of 3 of mebp: learning rate 0.001, 20 steps" in notes
    for name in ("loss", "accuracy", "footprint"):
        root = ElementTree.parse(out / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and int(root.get("height", "")) > 300
        titles = {one.text for one in root.iter() if one.get("class") == "title"}
        assert titles and all(
            escape(str(one)) in (out / "compare.html").read_text() for one in titles
        )
    made = len(runs.made)
    assert compare(given, notes.append, runs) == report
    assert len(runs.made) == made  # also what diverged is not tried again


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    given = settings(tmp_path, methods="mezo")
    whole = compare(
        settings(tmp_path, output=str(tmp_path / "whole"), methods="mezo"), id, Runs(by_rate)
    )
    left = 2

    def stops(method: str, rate: float) -> Any:
        nonlocal left
        left -= 1
        return InterruptedRunError("SIGTERM") if left == 0 else by_rate(method, rate)

    first = Runs(stops)
    with pytest.raises(InterruptedRunError, match=r"sweep 2 of 3 of mezo.* same command again"):
        compare(given, id, first)
    assert len(first.made) == 2
    second = Runs(by_rate)
    assert compare(given, id, second) == whole
    assert not set(first.made[:1]) & set(second.made)
    with pytest.raises(UsageError, match=r"seed 0 \(now 7\)") as refused:
        compare(settings(tmp_path, methods="mezo", seed=7), id, second)
    assert "other settings" in str(refused.value) and "methods" not in str(refused.value)


def test_a_folder_takes_more_methods_and_fewer(tmp_path: Path) -> None:
    more, rates = "mezo,hizoo", {"learning_rates": "1e-5"}
    compare(settings(tmp_path, methods="mezo", **rates), id, first := Runs(by_rate))
    both = compare(settings(tmp_path, methods=more, **rates), id, second := Runs(by_rate))
    assert not set(first.made) & set(second.made) and list(both["methods"]) == ["mezo", "hizoo"]
    assert f'methods = "{more}"' in (tmp_path / "out" / "config.toml").read_text()
    one = compare(settings(tmp_path, methods="hizoo", **rates), id, third := Runs(by_rate))
    assert list(one["methods"]) == ["hizoo"] and third.made == []
    assert (tmp_path / "out" / "runs" / "mezo" / "summary.json").exists()
    with pytest.raises(UsageError, match="budget '300MB'"):
        compare(settings(tmp_path, methods=more, budget="1GB", **rates), id, third)
    assert 'methods = "hizoo,mezo"' in (tmp_path / "out" / "config.toml").read_text()


def test_a_method_joins_with_settings_of_its_own(tmp_path: Path) -> None:
    def given(methods: str, steps: str, rates: str) -> CompareConfig:
        return settings(tmp_path, methods=methods, steps=steps, learning_rates=rates)

    compare(given("mezo", "mezo=40", "mezo=1e-5"), id, first := Runs(by_rate))
    joined = given("hizoo", "hizoo=20", "hizoo=1e-4:3e-4")
    compare(joined, id, second := Runs(by_rate))
    assert second.made and not set(first.made) & set(second.made)
    stored = load(CompareConfig, tmp_path / "out" / "config.toml", {})
    assert stored.methods == "hizoo,mezo" and stored.steps == "hizoo=20,mezo=40"
    assert stored.learning_rates == "hizoo=1e-4:3e-4,mezo=1e-5"
    both = given("mezo,hizoo", "hizoo=20,mezo=40", "mezo=1e-5,hizoo=1e-4:3e-4")
    report = compare(both, id, third := Runs(by_rate))
    assert list(report["methods"]) == ["mezo", "hizoo"] and third.made == []
    for steps, rates in (("30", "1e-5"), ("mezo=40", "mezo=1e-6"), ("mezo=50", "mezo=1e-5")):
        with pytest.raises(UsageError, match=r"other settings: (steps|learning_rates) "):
            compare(given("mezo", steps, rates), id, third)
    assert third.made == []


def test_a_method_that_does_not_fit_or_diverges_is_said_as_such(tmp_path: Path) -> None:
    def mebp_fails(method: str, rate: float) -> Any:
        return BudgetError("budget 300 MB < 400 MB") if method == "mebp" else 4.0

    report = compare(settings(tmp_path, learning_rates="mezo=1e-4"), id, Runs(mebp_fails))
    assert report["methods"]["mebp"]["outcome"] == "over budget"
    assert len(report["sweep"]["mebp"]["tried"]) == 1  # the others would not fit either
    assert "mebp is over budget: budget 300 MB < 400 MB" in to_text(report)
    first = tables(report)[0].rows[1:3]
    assert first[0][2:4] == ("mebp", "not reached") and first[1][2:4] == ("mezo", "2")

    def late(method: str, rate: float) -> Any:
        return DivergedError("the loss of step 3 is inf")

    one = {"learning_rates": "mezo=1e-4", "methods": "mezo"}
    report = compare(settings(tmp_path, output=str(tmp_path / "late"), **one), id, Runs(late))
    assert report["methods"]["mezo"]["outcome"] == "diverged"
    assert report["methods"]["mezo"]["last"]["step"] == 2
    assert "never fell below" in to_text(report)
    with pytest.raises(DivergedError, match="no method could run: mezo: the loss of step 3"):
        compare(settings(tmp_path, output=str(tmp_path / "all"), methods="mezo"), id, Runs(late))


@pytest.mark.parametrize(("last", "rises"), [(3.05, False), (4.0, True)])
def test_a_loss_that_rises_again_is_said(tmp_path: Path, last: float, rises: bool) -> None:
    curve = curve_of({"before": 5.0, "2": 3.0, "after": last}, 4)
    trial = Trial("mezo", {"learning_rate": 1e-4, "epsilon": 1e-3})
    found = Finding(trial, (), None, "finished", "", curve, None)
    said = " ".join(notes(settings(tmp_path), {"mezo": found}))
    assert ("mezo's loss rose again after step 2: its rate may be" in said) == rises
    tried = (Tried(trial, "finished", "", 5.0, 3.0, 1.0),)
    said = " ".join(notes(settings(tmp_path), {"mezo": replace(found, tried=tried, chosen=0)}))
    assert ("mezo's loss rose again after step 2: a rate that is best in a" in said) == rises


def test_a_target_that_is_reached_before_training(tmp_path: Path) -> None:
    report = compare(settings(tmp_path, target_loss=6.0), id, Runs(by_rate))
    assert report["levels"] == [] and report["methods"]["mebp"]["steps"] == 0
    assert "already at the target" in to_text(report)


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("words")
    for more, way_out in (
        ({}, "--eval-data random:SEED"),
        ({"valid_split": "10%"}, "--eval-data random:SEED"),
        ({"data": str(data)}, "--eval-data or --valid-split"),
    ):
        with pytest.raises(UsageError, match=way_out):
            compare(settings(tmp_path, eval_data=None, **more), id, Runs(by_rate))
    given = settings(tmp_path)

    def refuses(settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        raise UsageError("no bucket")

    for _ in range(2):
        with pytest.raises(UsageError, match="no bucket"):
            compare(given, id, refuses)
        assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="no bucket"):
        compare(given, id, refuses)
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "out" / "config.toml").touch()  # of a run, say
    with pytest.raises(UsageError, match="other files"):
        compare(given, id, Runs(by_rate))


class Page(HTMLParser):
    """What a page opens, closes, points to and says."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.pointers, self.seen = list[str](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.seen.append(tag)
        self.pointers += [value for name, value in attributes if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_and_escapes_everything(tmp_path: Path) -> None:
    def ends(method: str, rate: float) -> Any:
        return DivergedError("<script>alert(1)</script> & more") if rate == 1e-3 else 4.0

    compare(settings(tmp_path, bundle=str(tmp_path / 'a<b>"&')), id, Runs(ends))
    text = (tmp_path / "out" / "compare.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and "script" not in page.seen and "b" not in page.seen
    assert page.seen.count("figure") == 5 and page.pointers == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    assert "http" not in text and "url(" not in text and "@import" not in text


# --- processes --------------------------------------------------------------------------------


def test_the_last_words_of_a_process() -> None:
    said = "ondevice: warning: slow\nplan\r\nrow: 3\rondevice: budget 1 MB < 2 MB;\n  or more\r\n"
    assert command._message(said) == "budget 1 MB < 2 MB;\n  or more"
    assert command._message("ondevice: warning: slow\nTraceback\nKeyError: 3") == ""


def test_the_last_words_of_a_process_are_not_passed_on_before_its_end() -> None:
    said = "ondevice: warning: slow\nplan\r\nrow ondevice: 3\rondevice: wrong;\n  or more\r\n"
    cut = said.index("ondevice: wrong")
    for size in range(1, len(said)):
        passed, left = "", ""
        for start in range(0, len(said), size):
            more, left = process.parted(f"\n{passed}"[-1], left + said[start : start + size])
            passed += more
        assert (passed, left) == (said[:cut], said[cut:])


def test_errors_of_a_process_are_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BundleError, match="no bundle"):
        measure_training({"bundle": str(tmp_path / "none"), "data": "random:1"}, tmp_path / "run")
    assert "no bundle" in capfd.readouterr().err
    for code, ending in (("raise SystemExit(9)", "code 9"), ("import os; os.abort()", "SIGABRT")):
        (tmp_path / "ondevice.py").write_text(f"import sys; sys.stderr.write('oh'); {code}\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "ROOT", tmp_path)
            with pytest.raises(OnDeviceError, match=ending) as raised:
                command.ondevice("train")
        assert type(raised.value) is OnDeviceError


@pytest.fixture
def bundle(tiny: Tiny) -> Path:
    return tiny("qwen2", seq_lens=(16, 32), device="auto").path


# Imported at the start of every Python: a run interrupts the command that started it at its step 5,
# and goes on when that has asked it to end, so that no clock decides how far it is.
INTERRUPTING = """
import os, signal, sys, time

if "train" in sys.orig_argv:
    import ondevice.cli.progress as progress
    bar = progress.step_bar

    def told(show, entry, *what):
        if entry.number == 5:
            arrived = []
            handler = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
            os.kill(os.getppid(), signal.SIGTERM)
            while not arrived:
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, handler)
            signal.raise_signal(signal.SIGTERM)
        show(entry, *what)

    from contextlib import contextmanager

    @contextmanager
    def interrupting(*a, **k):
        with bar(*a, **k) as show:
            yield lambda *what: told(show, *what)

    progress.step_bar = interrupting
"""


def test_a_comparison_as_users_make_it(bundle: Path, tmp_path: Path) -> None:
    """Interrupted in the middle of a run, gone on with, refused with other settings."""
    out = tmp_path / "out"
    arguments = ["compare", str(bundle), "--data=random:5", "--eval-data=random:9"]
    arguments += ["--eval-rows=2", "--max-seq-length=24", "--batch-size=2", "--budget=200MB"]
    arguments += ["--steps=mebp=8,mezo=4", "--eval-every=mebp=4,mezo=2", "--sweep-steps=2"]
    arguments += ["--learning-rates=mebp=1e-4:1e-2,mezo=1e-3", "-o", str(out)]
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}
    started = ondevice(*arguments, env=environment)
    assert started.returncode == 130 and "same command again" in started.stderr, started.stderr
    assert "Traceback" not in started.stderr
    assert "--resume" not in started.stderr  # of the run alone, whose own way to go on it is
    assert started.stderr.count("\nondevice: ") == 1
    (saved,) = (out / "runs" / "mebp" / "saves").glob("step-*")
    assert saved.name == "step-00000005" and not (out / "runs" / "mebp" / "summary.json").exists()
    swept = {path: path.stat().st_mtime_ns for path in out.glob("sweep/*/summary.json")}
    assert len(swept) == 2
    done = succeeds(*arguments, "--json")
    assert "resuming after step 5" in done.stderr
    assert swept == {path: path.stat().st_mtime_ns for path in out.glob("sweep/*/summary.json")}
    report = json.loads(done.stdout)
    assert report == json.loads((out / "compare.json").read_text())
    mebp, mezo = report["methods"]["mebp"], report["methods"]["mezo"]
    assert mebp["curve"]["steps"]["step"] == list(range(1, 9))
    assert [point["step"] for point in mebp["curve"]["points"]] == [0, 4, 8]
    assert [point["step"] for point in mezo["curve"]["points"]] == [0, 2, 4]
    assert mebp["last"]["forward_passes"] == 8 * 2 * 3  # forward, again, and the gradient
    assert mezo["last"]["forward_passes"] == 4 * 2 * 2
    assert mebp["curve"]["points"][0]["loss"] == mezo["curve"]["points"][0]["loss"]
    assert mebp["stopped"] == mezo["stopped"] == "steps"
    tokens = [out / "runs" / name / "config.toml" for name in ("mebp", "mezo")]
    for key in ("seed", "data", "eval_data", "budget", "batch_size"):
        first, second = (
            [x for x in p.read_text().splitlines() if x.startswith(key)] for p in tokens
        )
        assert first == second
    refuses(2, "budget '200MB' (now '100MB')", *arguments, "--budget=100MB")
    assert read_curve(out / "runs" / "mezo").to_json() == mezo["curve"]


def test_a_budget_too_small_for_all_is_refused(bundle: Path, tmp_path: Path) -> None:
    arguments = ["compare", bundle, "--data=random:5", "--eval-data=random:9", "--steps=3"]
    arguments += ["--max-seq-length=24", "--budget=20MB", "-o", tmp_path / "out"]
    done = refuses(3, "no method could run", *arguments, by=ondevice)
    assert "smallest that fits" in done.stderr
    assert not (tmp_path / "out").exists()


def test_settings_of_adapters_and_packing_reach_every_run(tmp_path: Path) -> None:
    runs, seen = Runs(lambda method, rate: 2.0), list[dict[str, Any]]()

    def measure(settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        seen.append({name: settings[name] for name in settings if "lora" in name or name == "pack"})
        return runs(settings, run)

    lora = {"lora_rank": 4, "lora_layers": 2, "rslora": False, "pack": True}
    compare(settings(tmp_path, **lora), lambda text: None, measure)
    assert len(seen) >= 4 and all(one == lora for one in seen)


def test_how_long_rows_are_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = SimpleNamespace(manifest=SimpleNamespace(buckets=(16, 32)))
    monkeypatch.setattr("harness.compare.compare.open_bundle", lambda path: bundle)
    runs, said = Runs(by_rate), list[str]()
    report = {"source": "rows.jsonl", "read": 3, "kept": 3, "lengths": {"12": 2, "20": 1}}

    def measure(settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        return {**runs(settings, run), "data": {"train": report}}

    compare(settings(tmp_path), said.append, measure)
    shown = [text for text in said if "up to 16 tokens" in text]
    assert len(runs.made) > 4 and len(shown) == 1
    assert "up to 32 tokens               1  ############" in shown[0]


def test_what_methods_forget_is_shown_and_not_measured_in_a_sweep(tmp_path: Path) -> None:
    runs, measured = Runs(lambda method, rate: 2.0), list[str]()
    losses = {"general": {"before": evaluation(3.0), "after": evaluation(3.5)}}

    def measure(settings: Mapping[str, Any], run: Path) -> dict[str, Any]:
        if "also_evaluate" in settings:
            assert settings["also_evaluate"] == ["none"]
            return runs(settings, run)
        measured.append(run.parent.name)
        return runs(settings, run) | {"also_eval": losses}

    text = to_text(compare(settings(tmp_path), lambda text: None, measure))
    assert {*measured} == {"runs"}
    assert re.search(r"mebp +general +3\.0000 +3\.5000", text), text


Cost = tuple[float, float] | None  # seconds, MB


def level(loss: float, meaning: str = "some", **reached: Cost) -> dict[str, Any]:
    points = {
        name: None if cost is None else {"seconds": cost[0], "peak_bytes": int(cost[1] * 1e6)}
        for name, cost in reached.items()
    }
    return {"loss": loss, "meaning": meaning, "reached": points}


HALF = level(3.0, "50% of the way", mebp=(1500.0, 90.0), mezo=(30_000.0, 70.0))
MEZO_FIRST = level(4.0, mebp=(900.0, 90.0), mezo=(600.0, 70.0))
FAR = level(2.0, "best of mebp", mebp=(2000.0, 90.0), mezo=None)
TARGET = level(1.5, "the target", mebp=None, mezo=None)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([], "No method fell below the loss before training."),
        (
            [HALF, FAR],
            "mebp was first at every level. The lowest level that all reached, a loss of 3.0000 "
            "(50% of the way), took mebp 1,500.0 s and 90.0 MB; mezo 30,000.0 s and 70.0 MB, 20 "
            "times as long. Only mebp went on, to a loss of 2.0000 (best of mebp): 2,000.0 s and "
            "90.0 MB.",
        ),
        (
            [MEZO_FIRST, TARGET],
            "mezo was first at every level. The lowest level that all reached, a loss of 4.0000 "
            "(some), took mezo 600.0 s and 70.0 MB; mebp 900.0 s and 90.0 MB, 1.5 times as long. "
            "No method reached a loss of 1.5000 (the target).",
        ),
        (
            [FAR],
            "mebp was first at every level. Only mebp came to a loss of 2.0000 (best of mebp): "
            "2,000.0 s and 90.0 MB.",
        ),
        ([TARGET], "No method reached a loss of 1.5000 (the target)."),
    ],
)
def test_the_whole_verdict(levels: list[dict[str, Any]], said: str) -> None:
    assert verdict(levels) == said


def test_winners_are_counted_where_they_differ() -> None:
    assert verdict([MEZO_FIRST, HALF, FAR]).startswith(
        "mebp was first at 2 of 3 levels, mezo at 1. The lowest level that all reached, a loss of "
        "3.0000"
    )


def test_one_method_is_compared_with_nothing() -> None:
    near, far = level(3.0, mezo=(5.0, 70.0)), level(1.5, "the target", mezo=None)
    assert verdict([near]) == "mezo came to a loss of 3.0000 (some): 5.0 s and 70.0 MB."
    assert verdict([near, far]).endswith("It did not reach a loss of 1.5000 (the target).")
    assert verdict([far]) == "It did not reach a loss of 1.5000 (the target)."


def test_a_level_that_was_reached_before_training_has_no_ratio() -> None:
    """Two plans may differ in the last bits of the loss before training."""
    said = verdict([level(4.9999999, mebp=(10.0, 90.0), mezo=(0.0, 70.0))])
    assert "took mezo 0.0 s and 70.0 MB; mebp 10.0 s and 90.0 MB." in said


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
