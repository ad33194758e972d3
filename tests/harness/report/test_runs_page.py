"""`ondevice report`: one page on several runs, which a browser shows in light and in dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.bundles import Tiny
from support.runs import here, refuses, succeeds, train_arguments
from support.shared import Shared
from support.waiting import HANGS_S

from harness.report.runs_page import charts_of, read_run

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
STEPS = {"first": 12, "second": 8}


class Tags(HTMLParser):
    """Every tag with its attributes, and every text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def runs(tiny: Tiny, shared: Shared) -> Path:
    """A folder with two runs of different settings."""
    bundle = tiny("gemma3").path

    def train(folder: Path) -> None:
        folder.mkdir()
        options = {"eval_data": "random:5", "eval_rows": 1, "eval_every": 4, "learning_rate": 0.1}
        clipped = {"max_grad_norm": 1, "seed": 3}
        for name, more, flags in (("first", {}, ["--profile"]), ("second", clipped, [])):
            given = train_arguments(bundle, folder / name, STEPS[name], **options, **more)
            succeeds(*given, *flags)

    return shared("two runs for a report", train)


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "both.html"
    done = succeeds("report", runs / "first", runs / "second", "-o", path, by=here)
    assert done.stdout == f"the page of first, second is {path}\n"
    return path


def test_the_page_needs_nothing_else(report: Path) -> None:
    text = report.read_text()
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<img|<iframe", text)
    for tag, attributes in Tags(text).tags:
        assert not {"src", "href", "srcset", "data", "onload"} & set(attributes), tag


def test_the_page_shows_what_the_runs_measured(runs: Path, report: Path) -> None:
    texts = Tags(report.read_text()).texts
    for name, steps in STEPS.items():
        summary = json.loads((runs / name / "summary.json").read_text())
        assert name in texts and f"{steps} of {steps}" in texts
        assert f"{summary['final_train_loss']:.4f}" in texts
        best = min(one["loss"] for one in summary["eval"].values())
        assert any(text.startswith(f"{best:.4f} at step ") for text in texts)
    titles = {
        "Loss", "Next-token accuracy on held-out data", "Learning rate", "Footprint of the process",
        "Norm of the gradients before clipping", "Time per step", "Settings that differ",
    }  # fmt: skip
    assert titles <= set(texts)
    differ = texts[texts.index("Settings that differ") : texts.index("Settings of all")]
    assert {"steps", "seed", "max_grad_norm"} <= set(differ) and "batch_size" not in differ
    found = [read_run(runs / name, name) for name in STEPS]
    charts = {chart.title: chart for chart in charts_of(found)}
    lines = [json.loads(line) for line in (runs / "first" / "metrics.jsonl").open()]
    assert charts["Loss"].lines[0].points == [(one["step"], one["loss"]) for one in lines]
    assert [x for x, _ in charts["Loss"].lines[2].points] == [0, 4, 8, 12]
    (budget,) = charts["Footprint of the process"].levels  # the same for both
    assert budget.height == 400.0 and budget.name == "budget 400 MB"
    assert [len(one.points) for one in charts["Norm of the gradients before clipping"].lines] == [
        0, STEPS["second"],
    ]  # fmt: skip


def test_the_page_shows_where_time_and_memory_go(runs: Path, report: Path) -> None:
    summary = json.loads((runs / "first" / "summary.json").read_text())
    charts = {one.title: one for one in charts_of([read_run(runs / "first", "first")])}
    for title, key, scale in (
        ("Most memory allocated in each block", "peak_bytes", 1e-6),
        ("Time per step in each block", "s", 1.0),
    ):
        assert title in report.read_text()
        names = [block["name"] for block in summary["blocks"]]
        assert list(charts[title].places) == [name.rpartition(".")[2] for name in names]
        for line, direction in zip(charts[title].lines, ("forward", "backward"), strict=True):
            assert line.name == f"first, {direction}"
            values = [block.get(f"{direction}_{key}") for block in summary["blocks"]]
            known = [(at, value * scale) for at, value in enumerate(values) if value is not None]
            assert line.points == known and len(known) >= 3
    texts = Tags(report.read_text()).texts
    table = texts[
        texts.index("Where the time of a step goes") : texts.index("Settings that differ")
    ]
    assert set(summary["seconds_per_step"]) <= set(table)
    assert not charts_of([read_run(runs / "second", "second")])[-1].lines[0].points


def test_a_run_that_is_still_trained_has_a_page(runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "first", tmp_path / "<b>&run"))
    (run / "summary.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    done = here("report", run, "-o", tmp_path / "page.html", "--json")
    assert json.loads(done.stdout) == {"output": str(tmp_path / "page.html"), "runs": [run.name]}
    found = Tags((tmp_path / "page.html").read_text())
    assert "not ended" in found.texts and "5 of 12" in found.texts
    assert f"Training: {run.name}" in "".join(found.texts)
    assert not any(tag == "b" for tag, _ in found.tags)
    (run / "metrics.jsonl").unlink()
    (run / "evaluations.json").unlink()
    assert here("report", run, "-o", tmp_path / "page.html").returncode == 0
    assert "No step has been trained yet." in (tmp_path / "page.html").read_text()


def test_what_is_no_run_is_refused(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    metrics = (runs / "first" / "metrics.jsonl").read_text()
    evaluations = (runs / "first" / "evaluations.json").read_text()
    damaged = Path(shutil.copytree(runs / "first", tmp_path / "damaged"))
    cases: list[tuple[list[object], int, str]] = [
        ([], 2, "RUN... is missing (run directories"),
        ([tmp_path], 2, "holds no run: it has no config.toml"),
        ([runs / "first", runs / "first"], 2, "a run is given twice"),
        ([runs / "first", "--output", tmp_path / "page.txt"], 2, "a name that ends in .html"),
    ]
    for name, text in (
        ("metrics.jsonl", '{"step": 1}\n'),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", metrics.replace('"seconds": ', '"seconds": "long", "was": ', 1)),
        ("metrics.jsonl", metrics.replace('"learning_rate": ', '"learning_rate": NaN, "was": ')),
        ("metrics.jsonl", metrics.replace('"loss": ', '"loss": [], "was": ', 1)),
        ("plan.json", '{"budget_bytes": "much"}'),
        ("summary.json", '{"stopped": 3}'),
        ("summary.json", '{"blocks": [{"name": 3}]}'),
        ("summary.json", '{"blocks": [{"name": "a", "forward_s": "long"}]}'),
        ("summary.json", '{"seconds_per_step": {"a": []}}'),
        ("evaluations.json", evaluations.replace('"accuracy": ', '"accuracy": "all", "was": ')),
        ("evaluations.json", "[]"),
        ("evaluations.json", '{"before": {}}'),
        ("evaluations.json", '{"soon": {"loss": 1}}'),
        ("config.toml", "steps = "),
    ):
        run = Path(shutil.copytree(damaged, tmp_path / f"damaged-{len(cases)}"))
        (run / name).write_text(text)
        line = " in line 1" if name == "metrics.jsonl" else ""
        cases.append(([run], 4, f"{run / name} is damaged{line}: "))
    for arguments, code, said in cases:
        refused = refuses(code, said, "report", "-o", page, *arguments)
        assert "Traceback" not in refused.stderr and not page.exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it_in_light_and_in_dark(report: Path, tmp_path: Path, dark: bool) -> None:
    """Every colour of a run is seen, on the ground that the reader's setting asks for."""
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    scheme = 0 if dark else 1
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--blink-settings=preferredColorScheme={scheme}", "--window-size=900,4300",
        f"--user-data-dir={tmp_path / 'browser'}", f"--screenshot={picture}",
    ]  # fmt: skip
    done = subprocess.run(
        [str(CHROMIUM), *flags, report.as_uri()], capture_output=True, text=True, timeout=HANGS_S
    )
    assert picture.exists(), done.stderr
    pixels = np.rint(imread(picture)[..., :3] * 255).astype(int).reshape(-1, 3)
    ground = (0x16, 0x18, 0x1B) if dark else (255, 255, 255)
    seen = {colour: _count(pixels, colour) for colour in (ground, *_colours(report, dark))}
    assert seen[ground] > 0.8 * len(pixels)
    assert min(seen.values()) > 1000, seen


def _colours(report: Path, dark: bool) -> list[tuple[int, int, int]]:
    """The colours of the two runs in the page's style: the dark ones come second."""
    found = [
        re.findall(rf"--c{number}: #([0-9a-f]{{6}});", report.read_text())[dark]
        for number in range(2)
    ]
    return [(int(one[:2], 16), int(one[2:4], 16), int(one[4:], 16)) for one in found]


def _count(pixels: np.ndarray, colour: tuple[int, int, int]) -> int:  # type: ignore[type-arg]
    return int((np.abs(pixels - np.array(colour)).max(1) <= 2).sum())
