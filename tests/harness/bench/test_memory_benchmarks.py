"""Benchmarks of budgets, machines and peers: numbers, then runs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.benches import MODEL, exported_for_16
from support.shared import Shared

from harness.bench import bench as benches
from harness.bench import benchmark
from harness.bench import peers as peer_bench
from harness.bench.bench import BENCHMARKS, bench, command, to_text
from harness.bench.benchmark import Bench, Row
from harness.bench.budget_curve import CURVE, between_dtypes, compare, spaced_budgets
from harness.config.bench import BenchConfig, times_smallest
from harness.measure.command import ondevice
from runtime.core.errors import BudgetError, OnDeviceError, UsageError
from runtime.machine.machine import read_machine

pytestmark = pytest.mark.usefixtures("forked")


def variant(method: str, peak: float | None, **more: Any) -> dict[str, Any]:
    process = {"predicted_peak_bytes": 1.1e8, "budget_bytes": 114_000_000}
    return {
        "name": f"{method}, our plan, min",
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
    assert names == ["mebp, our plan, 1GB", "mezo, our plan, 1GB"]
    assert str(tmp_path) not in output.read_text() and "no room in RUNS" in output.read_text()


# --- budgets ----------------------------------------------------------------------------------


def test_budgets_in_terms_of_the_smallest() -> None:
    assert [times_smallest(text) for text in ("min", "2xmin", "1.5xmin", "2min", "1GB")] == [
        *(1.0, 2.0, 1.5, None, None)
    ]
    config = BenchConfig(name="x", budget="min,2xmin,1GB")
    assert config.budgets == ("min", "2xmin", "1GB") and BenchConfig(name="x").budgets == ()
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
    ],
)
def test_wrong_peers_are_refused_before_a_bundle_is_made(
    tmp_path: Path, wrong: dict[str, str], said: str
) -> None:
    config = BenchConfig(name="peers", bundles=str(tmp_path), models=MODEL, **wrong)
    with pytest.raises(UsageError, match=said):
        bench(config, lambda text: None)
    assert list(tmp_path.iterdir()) == []


# --- end to end -------------------------------------------------------------------------------


def test_a_benchmarks_lengths_hold_where_no_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Bench] = []

    def rows(given: Bench) -> Iterator[Row]:
        seen.append(given)
        yield from ()

    made = benches.Benchmark("text", None, (MODEL,), (1, 2), rows, lambda rows: [])
    monkeypatch.setattr(benchmark, "SOME", made, raising=False)
    monkeypatch.setitem(BENCHMARKS, "some", "benchmark.SOME")
    given = {"name": "some", "bundles": str(tmp_path / "b"), "output": str(tmp_path / "x.json")}
    bench(BenchConfig(**given), lambda text: None)
    bench(BenchConfig(**given, seq_lens="5", budget="2xmin"), lambda text: None)
    assert seen[0].cases == {MODEL: (1, 2)} and seen[0].budgets == ("1GB",)
    assert seen[1].cases == {MODEL: (5,)} and seen[1].budgets == ("2xmin",)


@pytest.fixture(scope="module")
def bundles(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shared("bundles of benchmarks", exported_for_16)
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("of") / "bundles"))


def run(bundles: Path, tmp_path: Path, name: str, **more: Any) -> tuple[Row, str]:
    """The one row of a tiny benchmark, and the text of its report."""
    output = tmp_path / "found.json"
    given = {"models": MODEL, "seq_lens": "16", "steps": 2, "repeats": 1, **more}
    config = BenchConfig(name=name, bundles=str(bundles), output=str(output), **given)
    report = bench(config, lambda text: None)
    assert report == json.loads(output.read_text()) and report["complete"]
    assert str(bundles) not in output.read_text()
    assert [path.name for path in bundles.iterdir()] == [MODEL]
    (found,) = report["rows"]
    assert not any(one["failed"] for one in found.get("variants", ()))
    return found, to_text(report)


def test_curve(bundles: Path, tmp_path: Path) -> None:
    found, text = run(bundles, tmp_path, "curve", budget="60MB,4GB")
    assert len(found["variants"]) == 4
    assert "tile_values" in found["variants"][0]["processes"][0]["choices"]
    assert text.count("of the smallest of 2 budgets takes x") == 2
    assert (tmp_path / f"found-{MODEL}-16.svg").exists()


def test_machine(bundles: Path, tmp_path: Path) -> None:
    """What it finds is a machine that plans take."""
    found, text = run(bundles, tmp_path, "machine", budget="1.5xmin")
    assert all(speed > 0 for speed in found["speeds"].values())
    assert [one["extra_bytes"] is None for one in found["variants"]] == [False, False]
    machine = read_machine(tmp_path / "found.json")
    assert machine.process_bytes > 10_000_000 and machine.heap.flat_bytes >= 0
    assert "Constants for `--machine`" in text and "share_of_logits" in text
    flags = ["--max-seq-length=16", "--budget=1GB", "--json"]
    flags.append(f"--machine={tmp_path / 'found.json'}")
    plan = json.loads(ondevice("plan", str(bundles / MODEL), *flags))
    assert plan["process_bytes"] >= machine.process_bytes


def test_peers(bundles: Path, tmp_path: Path) -> None:
    found, text = run(bundles, tmp_path, "peers", peers="ours,paper", budget="1GB")
    ours, paper = found["variants"]
    assert paper["time_ratio"]["median"] > 0 and ours["time_ratio"] is None
    assert ours["processes"][0]["command"].startswith(f"ondevice train {MODEL} ")
    assert "time: ours/it" in text and "ondevice train --plan paper" in text
    assert peer_bench.OPTION in text
