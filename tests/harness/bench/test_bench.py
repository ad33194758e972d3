"""Benchmarks: statistics, tables and fits on made-up numbers, refusals, and a tiny run of each."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.runs import measured, refuses
from support.shared import Shared

from harness.bench import bench as benches
from harness.bench import benchmark, mebp_tables
from harness.bench import peers as peer_bench
from harness.bench.bench import BENCHMARKS, bench, command, find, to_text
from harness.bench.benchmark import Bench, Row
from harness.bench.budget_curve import CURVE, between_dtypes, compare, spaced_budgets
from harness.bench.machine import PREDICTED_UNDER, PREDICTED_WITHIN, fit
from harness.bench.mebp_tables import TABLE2
from harness.config.bench import BenchConfig, parts, times_smallest
from harness.measure import bundles as exported
from harness.measure.bundles import bundle_of
from harness.measure.command import ondevice
from harness.measure.repeats import (
    Outcome,
    figures,
    in_turn,
    peak_ratio,
    reason,
    spread,
    time_ratio,
)
from runtime.bundle.store import MANIFEST, Bundle, open_bundle
from runtime.config.train import TrainConfig
from runtime.core.errors import BudgetError, InterruptedRunError, OnDeviceError, UsageError
from runtime.machine.machine import Machine, read_machine
from runtime.plan.allocator import with_kept
from runtime.plan.plan import Plan
from runtime.plan.planner import Planner
from runtime.run.budget import training

MODEL = "tiny-qwen2"


def process(*step_s: float, peak: int = 100) -> dict[str, Any]:
    return {"step_s": list(step_s), "peak_footprint_bytes": peak, "peak_rss_bytes": peak + 50}


pytestmark = pytest.mark.usefixtures("forked")


# --- statistics -------------------------------------------------------------------------------


def test_variants_run_in_turn_and_failures_are_kept() -> None:
    ran: list[str] = []

    def run(name: str, fails_at: int = 99) -> Callable[[], dict[str, Any]]:
        def one() -> dict[str, Any]:
            ran.append(name)
            if ran.count(name) == fails_at:
                raise BudgetError("budget 1 MB < 2 MB needed; the smallest that fits is 2 MB")
            return process(1.0)

        return one

    found = in_turn({"a": run("a"), "b": run("b", 2), "c": run("c", 1)}, 3, lambda text: None)
    assert ran == ["a", "b", "c", "a", "b", "a"]
    assert [len(one.processes) for one in found.values()] == [3, 1, 0]
    assert found["a"].failed is None
    assert found["b"].failed == found["c"].failed == "budget 1 MB < 2 MB needed"


def test_a_wish_to_stop_is_no_failure() -> None:
    def stopped() -> dict[str, Any]:
        raise InterruptedRunError("SIGTERM: saved after step 2")

    with pytest.raises(InterruptedRunError):
        in_turn({"a": stopped}, 2, lambda text: None)
    kept = in_turn({"a": lambda: process(1.0), "b": stopped}, 1, lambda text: None)
    assert kept == {"a": Outcome([process(1.0)]), "b": Outcome(failed="interrupted")}
    runs = {"once": lambda: process(2.0), "a": lambda: process(1.0), "b": stopped}
    kept = in_turn(runs, 2, lambda text: None, once=["once"])
    assert kept["once"].failed is None and kept["a"].failed == "interrupted"
    assert reason(OnDeviceError("no space; make room")) == "no space"


def test_figures_of_all_processes() -> None:
    slow = Outcome([process(4.0, 5.0, peak=300), process(6.0, 6.0, peak=200)])
    fast = Outcome([process(2.0, 3.0), process(2.0, 1.0), process(9.0)])
    assert figures(slow)["step_s"] == {"median": 5.5, "low": 4.0, "high": 6.0}
    assert figures(slow)["peak_footprint_bytes"] == 300
    assert figures(slow)["peak_rss_bytes"] == 350
    ratio = time_ratio(slow, fast)  # 4.5 / 2.5 and 6 / 1.5; the third turn has no pair
    assert ratio == {"median": pytest.approx(2.9), "low": 1.8, "high": 4.0}
    assert peak_ratio(slow, fast) == 3.0
    empty = Outcome(failed="no room")
    assert figures(empty)["step_s"] is figures(empty)["peak_rss_bytes"] is None
    assert time_ratio(slow, empty) is peak_ratio(empty, slow) is spread([]) is None


# --- the papers' figures and their tables -----------------------------------------------------


def test_published_figures_agree_with_what_the_papers_say_of_them() -> None:
    steps = mebp_tables.STEPS
    table2 = [(steps[name, 256, "mebp"], steps[name, 256, "mezo"]) for name in mebp_tables.MODELS]
    ratios = [mebp.seconds / mezo.seconds - 1 for mebp, mezo in table2]
    assert (int(100 * min(ratios)), round(100 * max(ratios))) == (43, 94)  # "43% to 94%"
    most = max(mebp.peak_mb / mezo.peak_mb for mebp, mezo in table2)
    assert 1.19 < most < 1.2  # "up to 20% more memory"
    assert all(steps[key].peak_mb > 300 for key in steps)


def variant(method: str, peak: float | None, **more: Any) -> dict[str, Any]:
    process = {"predicted_peak_bytes": 1.1e8, "budget_bytes": 114_000_000}
    return {
        "name": f"{method}, min",
        "method": method,
        "budget": "min",
        "compute_dtype": "float32",
        "failed": None if peak else "no room",
        "step_s": {"median": 4.5, "low": 4.4, "high": 4.6} if peak else None,
        "peak_footprint_bytes": peak,
        "peak_rss_bytes": peak and peak + 6e7,
        "processes": [process] if peak else [],
        **more,
    }


def made_up_row(model: str) -> dict[str, Any]:
    def one(method: str, peak: float | None, **more: Any) -> dict[str, Any]:
        step = mebp_tables.STEPS.get((model, 256, method))
        return variant(method, peak, published=None if step is None else vars(step), **more)

    seconds = {"median": 3.21, "low": 3.11, "high": 3.31}
    failed = {"name": "mebp, 1GB", "budget": "1GB", "failed": "budget 1 GB < 3 GB"}
    return {
        "model": model,
        "tokens": 256,
        "failed": None,
        "variants": [
            one("mezo", 1e8, step_s=seconds),
            one("mebp", 1.02e8),
            one("mebp", None, **failed),
        ],
        "ratios": [
            {
                "what": "mebp / mezo, min",
                "methods": ["mebp", "mezo"],
                "step_s": {"median": 1.4, "low": 1.38, "high": 1.444},
                "peak_footprint": 1.02,
            }
        ],
    }


def test_ours_stands_beside_the_papers() -> None:
    steps, ratios = TABLE2.tables([made_up_row("qwen2.5-0.5b")])
    plan = "min (114 MB)"
    assert steps.rows[1] == (
        *("qwen2.5-0.5b", "256", "mezo", plan, "3.21", "3.11-3.31", "100.0", "160.0", "110.0"),
        *("2.68", "318.93"),
    )
    assert steps.rows[3][3:5] == ("1GB", "did not run")
    assert steps.rows[3][-2:] == ("3.85", "320.17")
    assert ratios.rows[1][3:] == ("x1.40", "x1.38-x1.44", "x1.02", "mezo", "x1.44", "x1.00")
    assert len({len(row) for row in steps.rows}) == len({len(row) for row in ratios.rows}) == 1
    steps, ratios = TABLE2.tables([made_up_row(MODEL)])
    assert steps.rows[1][-2:] == ratios.rows[1][-2:] == ("not in the paper", "")
    row = made_up_row(MODEL)
    row["ratios"][0]["peak_footprint"] = 0.99
    assert TABLE2.tables([row])[1].rows[1][6] == "mebp"
    assert benchmark.failures([row]) == [f"{MODEL} at 256 tokens, mebp, 1GB: budget 1 GB < 3 GB"]


# --- refusals ---------------------------------------------------------------------------------


def test_unknown_benchmarks_and_models_are_refused_with_the_list(tmp_path: Path) -> None:
    done = refuses(2, "no benchmark 'mebp-table9'", "bench", "mebp-table9")
    assert all(f"{name}: " in done.stderr for name in BENCHMARKS)
    config = BenchConfig(name="mebp-table2", models="qwen2.5-0.5b,gpt-5")
    with pytest.raises(UsageError, match=r"no shapes for gpt-5; there are qwen2.5-0.5b, "):
        bench(config, print)
    with pytest.raises(UsageError, match="there is no folder"):
        bench(BenchConfig(name="mebp-table2", output=str(tmp_path / "no" / "x.json")), print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("models", "a,a"),
        ("models", "a,,b"),
        ("seq_lens", "16,x"),
        ("seq_lens", "0"),
        ("budget", "1GB,some"),
        ("steps", 1),
        ("repeats", 0),
    ],
)
def test_wrong_settings_are_refused(key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{key} is "):
        BenchConfig(name="mebp-table2", **{key: value})


def test_settings_as_the_benchmarks_take_them() -> None:
    config = BenchConfig(name="x", seq_lens="512, 16", budget="min, 2GB")
    assert config.lengths == (16, 512)
    assert (parts(config.budget), parts(config.models)) == (("min", "2GB"), ())
    config = BenchConfig(name="x", bundles="/far/away", budget="min", output="o.json", repeats=5)
    assert command(config) == "ondevice bench x --budget=min --repeats=5"


# --- bundles ----------------------------------------------------------------------------------


def exported_for_16(folder: Path) -> None:
    folder.mkdir()
    bundle_of(folder, MODEL, (16,), lambda text: None)


@pytest.fixture(scope="module")
def bundles(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of") / "bundles"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.measure.command.run", measured)
        shutil.copytree(shared("bundles of benchmarks", exported_for_16), folder)
        path = bundle_of(folder, MODEL, (16,), lambda text: None)
        assert open_bundle(path).manifest.buckets == (16,)
        bundle_of(folder, MODEL, (32,), lambda text: None)
    assert open_bundle(path).manifest.buckets == (16, 32)
    return folder


def test_bundles_are_used_again_and_others_are_not(
    bundles: Path, origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (bundles / MODEL / MANIFEST).stat().st_mtime_ns
    notes: list[str] = []
    bundle_of(bundles, MODEL, (16, 32), notes.append)
    assert (bundles / MODEL / MANIFEST).stat().st_mtime_ns == before and not notes
    (tmp_path / MODEL).symlink_to(origin.path)  # exported from a folder
    with pytest.raises(UsageError, match="not what `ondevice export random:tiny-qwen2` makes"):
        bundle_of(tmp_path, MODEL, (16,), print)
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(exported, "ondevice", lambda *arguments: ran.append(arguments))
    bundle_of(bundles, MODEL, (16, 64), notes.append)
    assert ran[0][:2] == ("export", f"random:{MODEL}")
    assert ran[0][-3:] == ("--seq-lens", "16,32,64", "--force")


# --- end to end -------------------------------------------------------------------------------


def run(bundles: Path, tmp_path: Path, name: str, **more: Any) -> dict[str, Any]:
    settings = {"models": MODEL, "seq_lens": "16", "steps": 3, "repeats": 1, **more}
    output = tmp_path / "found.json"
    config = BenchConfig(name=name, bundles=str(bundles), output=str(output), **settings)
    report = bench(config, lambda text: None)
    assert report == json.loads(output.read_text())
    assert report["complete"] and report["benchmark"] == name
    assert {"cpu", "cores", "memory_bytes", "mlx", "python"} <= set(report["machine"])
    assert {"version", "commit", "measured", "paper", "notes"} <= set(report)
    assert report["command"].startswith(f"ondevice bench {name} --models=tiny-qwen2")
    assert str(bundles) not in output.read_text()
    assert [path.name for path in bundles.iterdir()] == [MODEL]  # runs are taken away
    return report


def test_table2(bundles: Path, tmp_path: Path) -> None:
    report = run(bundles, tmp_path, "mebp-table2", repeats=2)
    (row,) = report["rows"]
    assert [one["method"] for one in row["variants"]] == ["mebp", "mezo"]
    for one in row["variants"]:
        assert one["failed"] is None and len(one["processes"]) == 2
        assert all(len(process["step_s"]) == 2 for process in one["processes"])
        assert 1e7 < one["peak_footprint_bytes"] <= one["peak_rss_bytes"]
    assert row["trainable_parameters"] > 0 and row["ratios"][0]["step_s"]["low"] > 0
    text = to_text(report)
    assert "iPhone 15 Pro Max" in text and "not in the paper" in text


def test_table2_of_more_lengths_and_budgets(bundles: Path, tmp_path: Path) -> None:
    report = run(bundles, tmp_path, "mebp-table2", seq_lens="16,32", budget="1MB,1GB")
    assert [row["tokens"] for row in report["rows"]] == [16, 32]
    for row in report["rows"]:
        *small, mebp, mezo = row["variants"]
        assert [one["method"] for one in (mebp, mezo)] == ["mebp", "mezo"]
        assert all(one["processes"][0]["budget_bytes"] == 10**9 for one in (mebp, mezo))
        assert all("budget 1 MB < " in one["failed"] and one["processes"] == [] for one in small)
    text = to_text(report)
    assert "did not run" in text
    assert f"- {MODEL} at 16 tokens, mebp, 1MB: budget 1 MB" in text


def test_bundles_that_cannot_be_made_are_said_so_in_their_rows(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, model: str, *rest: object) -> Path:
        raise OnDeviceError("the bundle needs about 900 MB, 10 MB are free; make room")

    monkeypatch.setattr(benchmark, "bundle_of", full)
    for name in (one for one in BENCHMARKS if find(one).models):
        report = run(bundles, tmp_path, name)
        (row,) = report["rows"]
        assert row["failed"] == "no bundle: the bundle needs about 900 MB, 10 MB are free"
        assert to_text(report).count(row["failed"]) == 2  # in its row, and below


def test_an_interrupted_benchmark_keeps_its_rows(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(settings: Any, run: Path) -> dict[str, Any]:
        raise InterruptedRunError("SIGTERM")

    output, trains = tmp_path / "found.json", benchmark.measure_training
    monkeypatch.setattr(benchmark, "measure_training", stops)
    given = {"bundles": str(bundles), "models": MODEL, "seq_lens": "16", "output": str(output)}
    with pytest.raises(InterruptedRunError, match="before anything"):
        bench(BenchConfig(name="mebp-table2", **given), lambda text: None)
    assert not output.exists()
    first = {"model": MODEL, "tokens": 16, "failed": "none"}

    def rows(given: Any) -> Any:
        yield first
        raise InterruptedRunError("SIGTERM")

    stopped = benches.Benchmark("text", (MODEL,), (16,), rows, TABLE2.tables)
    monkeypatch.setattr(benchmark, "STOPPED", stopped, raising=False)
    monkeypatch.setitem(BENCHMARKS, "stopped", "benchmark.STOPPED")
    with pytest.raises(InterruptedRunError, match=r"found\.json: 1 row$"):
        bench(BenchConfig(name="stopped", **given), lambda text: None)
    found = json.loads(output.read_text())
    assert found["rows"] == [first] and not found["complete"]
    trained: list[Any] = []

    def stops_second(settings: Any, run: Path) -> dict[str, Any]:
        trained.append(settings)
        return stops(settings, run) if len(trained) > 1 else trains(settings, run)

    monkeypatch.setattr(benchmark, "measure_training", stops_second)
    with pytest.raises(InterruptedRunError, match=r"found\.json: 1 row$"):
        bench(BenchConfig(name="mebp-table2", steps=2, repeats=1, **given), lambda text: None)
    (unfinished,) = json.loads(output.read_text())["rows"]
    first_variant, *others = unfinished["variants"]
    assert len(first_variant["processes"]) == 1 and first_variant["failed"] is None
    assert {variant["failed"] for variant in others} == {"interrupted"} and len(trained) == 2


def row(tokens: int, *variants: dict[str, Any], model: str = "qwen2.5-0.5b") -> Row:
    return {"model": model, "tokens": tokens, "failed": None, "variants": list(variants)}


def test_the_reason_why_a_budget_was_not_measured_has_no_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(settings: Any, run: Path) -> dict[str, Any]:
        raise BudgetError(f"no room in {run}; give more")

    monkeypatch.setattr(benchmark, "bundle_of", lambda *given: tmp_path / "b" / MODEL)
    monkeypatch.setattr(benchmark, "measure_training", refuses)
    output = tmp_path / "curve.json"
    given = {"models": MODEL, "seq_lens": "16", "budget": "1GB", "bundles": str(tmp_path / "b")}
    report = bench(BenchConfig(name="curve", output=str(output), **given), lambda text: None)
    names = [each["name"] for each in report["rows"][0]["variants"]]
    assert names == ["mebp, 1GB", "mezo, 1GB"]
    assert str(tmp_path) not in output.read_text() and "no room in RUNS" in output.read_text()


# --- budgets ----------------------------------------------------------------------------------


def test_budgets_in_terms_of_the_smallest() -> None:
    assert [times_smallest(text) for text in ("min", "2xmin", "1.5xmin", "2min", "1GB")] == [
        *(1.0, 2.0, 1.5, None, None)
    ]
    config = BenchConfig(name="x", budget="min,2xmin,1GB")
    assert parts(config.budget) == ("min", "2xmin", "1GB") and not parts(
        BenchConfig(name="x").budget
    )
    for odd in ("0xmin", "2min", "xmin", "min,min"):
        with pytest.raises(UsageError, match="budget is "):
            BenchConfig(name="x", budget=odd)


def test_budgets_rise_by_the_same_factor() -> None:
    assert spaced_budgets(100, 6400, 7) == tuple(f"{100 * 2**i}MB" for i in range(7))
    assert spaced_budgets(5000) == ("5000MB",)
    for smallest in (36, 114, 3999):
        sizes = [int(one.removesuffix("MB")) for one in spaced_budgets(smallest)]
        assert sizes == sorted(set(sizes)) and (sizes[0], sizes[-1]) == (smallest, 4000)
    assert len(spaced_budgets(114)) == 8


def budgeted(megabytes: int, low: float, high: float, tile: int) -> dict[str, Any]:
    process = {
        "budget_bytes": megabytes * 10**6,
        "predicted_peak_bytes": 9e7,
        "choices": {"tile_values": tile, "hold": False},
    }
    time = {"median": (low + high) / 2, "low": low, "high": high}
    return variant("mebp", 9e7, budget=f"{megabytes}MB", step_s=time, processes=[process])


def test_time_rises_only_beyond_the_spread_and_with_another_plan() -> None:
    falling = [budgeted(100, 4.0, 4.2, 1), budgeted(200, 3.0, 3.2, 2), budgeted(400, 3.1, 3.3, 3)]
    found = compare(falling)
    assert found["rises"] == [] and found["noise"] is None
    assert found["first_over_last"] == pytest.approx(4.1 / 3.2)
    slower = budgeted(800, 3.4, 3.6, 4)
    rises = compare([slower, *falling])["rises"]  # in any order, against every smaller budget
    assert [(rise["from_bytes"] // 10**6, rise["to_bytes"] // 10**6) for rise in rises] == [
        *((200, 800), (400, 800))
    ]
    same = compare([falling[2], budgeted(800, 3.4, 3.6, 3)])
    assert same["rises"] == [] and same["noise"] == pytest.approx(3.5 / 3.2)
    assert compare([])["first_over_last"] is None


def test_the_curve_is_drawn_and_told() -> None:
    rows = [row(256, budgeted(100, 4.0, 4.2, 1), budgeted(200, 3.0, 3.2, 2), variant("mezo", None))]
    (table,) = CURVE.tables(rows)
    assert table.rows[1][-2:] == ("+0.0 %", "tile_values 1") and table.rows[3][5] == "did not run"
    ((name, (chart,)),) = CURVE.pictures(rows).items()
    assert name == "qwen2.5-0.5b-256" and [line.name for line in chart.lines] == ["mebp"]
    assert chart.lines[0].points == [(100, pytest.approx(4.1)), (200, pytest.approx(3.1))]
    assert chart.lines[0].ranges == [(4.0, 4.2), (3.0, 3.2)] and chart.svg().count("range") == 2
    assert CURVE.pictures([row(256)]) == {}


def test_types_of_products_are_compared_budget_by_budget() -> None:
    both = [
        {**budgeted(100, low, high, 1), "compute_dtype": dtype, "budget": "min"}
        for dtype, low, high in (("float32", 4.0, 4.4), ("bfloat16", 2.0, 2.2))
    ]
    assert list(between_dtypes([*both, budgeted(200, 3.0, 3.2, 2)])) == [
        "mebp at min: a step in float32 takes x2.00 (1.82 to 2.20) of one in bfloat16"
    ]
    (_, (chart,)) = next(iter(CURVE.pictures([row(256, *both)]).items()))
    assert [line.name for line in chart.lines] == ["mebp", "mebp in bfloat16"]


# --- peers ------------------------------------------------------------------------------------


def test_a_program_that_cannot_run_has_its_reason_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = str(tmp_path / "python")
    Path(python).touch()

    def fails(setup: Any, name: str) -> dict[str, Any]:
        assert setup.budget == "400MB" and name == "torch-float32"
        raise OnDeviceError(f"torch cannot be imported by {python}, {sys.executable}, {tmp_path}/b")

    monkeypatch.setattr(benchmark, "bundle_of", lambda *given: tmp_path / "b" / MODEL)
    monkeypatch.setattr(peer_bench.Setup, "measure", fails)
    given = {"name": "peers", "models": MODEL, "peers": "torch-float32", "python": python}
    output = tmp_path / "peers.json"
    config = BenchConfig(bundles=str(tmp_path / "b"), output=str(output), **given)
    found = bench(config, lambda text: None)
    assert found == json.loads(output.read_text()) and str(tmp_path) not in output.read_text()
    assert "torch cannot be imported by --python, python, BUNDLES" in to_text(found)
    assert found["command"] == command(config) and "--python" not in found["command"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"peers": "ours,jax"}, "peers jax: choose some of"),
        ({"python": "no/python"}, "is no interpreter"),
        ({"budget": "1GB,2GB"}, "takes one budget"),
        ({"compute_dtype": "float32,bfloat16"}, "takes one type"),
    ],
)
def test_wrong_peers_are_refused_before_a_bundle_is_made(
    tmp_path: Path, wrong: dict[str, str], said: str
) -> None:
    config = BenchConfig(name="peers", bundles=str(tmp_path), models=MODEL, **wrong)
    with pytest.raises(UsageError, match=said):
        bench(config, lambda text: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options_that_a_benchmark_does_not_use_are_refused(name: str) -> None:
    others = {"seed": 7, "steps": 9, "compute_dtype": "bfloat16"}
    for unused in find(name).unused:
        config = BenchConfig(name=name, **{unused: others.get(unused, "1")})
        with pytest.raises(UsageError, match=f"--{unused.replace('_', '-')}=.* does not use it"):
            bench(config, lambda text: None)


def test_a_benchmarks_lengths_hold_where_no_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Bench] = []

    def rows(given: Bench) -> Iterator[Row]:
        seen.append(given)
        yield from ()

    made = benches.Benchmark("text", (MODEL,), (1, 2), rows, lambda rows: [])
    monkeypatch.setattr(benchmark, "SOME", made, raising=False)
    monkeypatch.setitem(BENCHMARKS, "some", "benchmark.SOME")
    given = {"name": "some", "bundles": str(tmp_path / "b"), "output": str(tmp_path / "x.json")}
    bench(BenchConfig(**given), lambda text: None)
    bench(BenchConfig(**given, seq_lens="5", budget="2xmin"), lambda text: None)
    assert seen[0].cases == {MODEL: (1, 2)} and seen[0].budgets == ("1GB",)
    assert seen[1].cases == {MODEL: (5,)} and seen[1].budgets == ("2xmin",)


def one_row(bundles: Path, tmp_path: Path, name: str, **more: Any) -> tuple[Row, str]:
    """The one row of a tiny benchmark, and the text of its report."""
    report = run(bundles, tmp_path, name, **{"steps": 2, **more})
    (found,) = report["rows"]
    assert not any(one["failed"] for one in found.get("variants", ()))
    text = to_text(report)
    tables = [line for line in text.splitlines() if "  " in line]
    assert max(map(len, tables)) <= 80
    return found, text


def test_curve(bundles: Path, tmp_path: Path) -> None:
    found, text = one_row(bundles, tmp_path, "curve", budget="60MB,4GB")
    assert len(found["variants"]) == 4
    assert "tile_values" in found["variants"][0]["processes"][0]["choices"]
    assert text.count("of the smallest of 2 budgets takes x") == 2
    assert (tmp_path / f"found-{MODEL}-16.svg").exists()


def test_machine(bundles: Path, tmp_path: Path) -> None:
    """What it finds is a machine that plans take."""
    found, text = one_row(bundles, tmp_path, "machine", budget="1.5xmin")
    assert all(speed > 0 for speed in found["speeds"].values())
    assert [one["extra_bytes"] is None for one in found["variants"]] == [False, False]
    machine = read_machine(tmp_path / "found.json")
    assert machine.process_bytes > 10_000_000 and machine.heap.flat_bytes >= 0
    assert "Constants for `--machine`" in text and "share_of_logits" in text
    flags = ["--max-seq-length=16", "--budget=1GB", "--json"]
    flags.append(f"--machine={tmp_path / 'found.json'}")
    plan = json.loads(ondevice("plan", str(bundles / MODEL), *flags))
    assert plan["process_bytes"] >= machine.process_bytes


def test_what_a_plan_keeps_is_measured_without_what_the_heap_holds_beside_it(
    bundles: Path, tmp_path: Path
) -> None:
    words = [f"--{name}" for name in ("method=mebp", "budget=1GB", "max-seq-length=16", "steps=1")]
    words += ["--seed=0", f"--scratch={tmp_path}"]
    measured = json.loads(
        ondevice(str(bundles / MODEL), *words, module="harness.bench.heap_process")
    )
    plan = msgspec.convert(measured["plan"], Plan)
    machine = msgspec.convert(measured["machine_value"], Machine)
    config = TrainConfig(bundle="b", data="random:0", budget="1GB", max_seq_length=16, steps=1)
    manifest = open_bundle(bundles / MODEL).manifest
    model = Planner(manifest, machine).model(training(config, manifest), plan.sizes)
    kept = measured["kept_in_use_bytes"]
    assert kept > 0 and with_kept(machine, model, kept, plan.kept) == plan.kept_bytes


def test_peers(bundles: Path, tmp_path: Path) -> None:
    found, text = one_row(bundles, tmp_path, "peers", peers="ours,mlx-lm-blas", budget="1GB")
    ours, other = found["variants"]
    assert other["time_ratio"]["median"] > 0 and ours["time_ratio"] is None
    trained = {one["processes"][0]["trainable_parameters"] for one in found["variants"]}
    assert len(trained) == 1 and trained != {0}
    assert ours["processes"][0]["command"].startswith(f"ondevice train {MODEL} ")
    assert "time: ours/it" in text and "mlx-lm's LoRA trainer" in text
    assert peer_bench.OPTION in text


Rng = np.random.Generator
MIDDLE = (PREDICTED_WITHIN - PREDICTED_UNDER) / 2


def test_a_fit_finds_values_that_predict_in_the_middle_of_the_target(rng: Rng) -> None:
    true = {
        "flat_bytes": float(rng.integers(500_000, 2_000_000)),
        "share": float(rng.uniform(0.02, 0.2)),
        "share_of_backward": float(rng.uniform(0.02, 0.2)),
        "share_of_logits": float(rng.uniform(0.1, 0.9)),
        "share_of_kept": float(rng.uniform(0.01, 0.1)),
    }
    processes = []
    for _ in range(40):
        features = {name: float(rng.uniform(1e6, 40e6)) for name in true} | {"flat_bytes": 1.0}
        predicted = sum(value * features[name] for name, value in true.items())
        fixed = float(rng.uniform(30e6, 60e6))
        # measured so that the prediction's relative error is `MIDDLE`
        peak = (fixed + predicted) / (1 + MIDDLE)
        processes.append(
            {
                "features": features,
                "peak_footprint_bytes": peak,
                "extra_bytes": peak - fixed,
                "mapped": False,
            }
        )
    outlier = processes[0] | {"extra_bytes": 1e9, "mapped": True}  # not fitted
    found = fit([{"variants": [{"processes": [*processes, outlier]}]}])
    for name, value in true.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.01, abs=0.001)
