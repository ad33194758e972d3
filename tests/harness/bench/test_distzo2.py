"""DistZO2's tables: the simulation by hand, the option of each row, and tables of made-up rows."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.exchange import NEEDS_MPI
from support.forks import ROOT

from harness.bench import distzo2
from harness.bench.bench import bench, to_text
from harness.bench.distzo2 import DISTZO2_TABLES, SHARINGS, _parts
from harness.bench.published import SHARED, SHARED_BY_BATCH
from harness.bench.simulation import (
    NETWORKS,
    Assumptions,
    Line,
    Network,
    Times,
    backprop_s,
    line_through,
    messages_bytes,
    simulate,
    sliced_bytes,
    zeroth_order_s,
)
from harness.config.bench import BenchConfig

SWITCH = Network("", 0.1, 100.0, 0.0, "switch")
RING = Network("", 0.1, 100.0, 0.0, "ring")
AIR = Network("", 0.1, 100.0, 0.01, "shared")
NONE = NETWORKS[0]
MEZO = Times(layers=3, forward=Line(0.5, 0.25), head=Line(0.0, 0.125), update_s=0.1, parameters=10)
MEBP = Times(3, Line(0.5, 0.25), Line(0.0, 0.125), 0.1, 10, Line(0.5, 0.5))
ASSUMED = Assumptions()
RECORDED = ROOT / "docs" / "lab" / "bench"


# --- the simulation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "gather", "total"),
    [
        # 8 machines, 10 bytes each: 1, 2 and 4 messages; 7 hops; 8 senders, one after another
        (SWITCH, 3 * 0.1 + 0.1 + 0.2 + 0.4, 2 * 7 * (0.1 + 0.1 / 8)),
        (RING, 7 * (0.1 + 0.1), 2 * 7 * (0.1 + 0.1 / 8)),
        (AIR, 3 * 0.1 + 8 * (3 * 0.01 + 0.1 + 0.2 + 0.4), 2 * 7 * (0.1 + 8 * (0.01 + 0.1 / 8))),
        (NONE, 0.0, 0.0),
    ],
)
def test_messages_by_hand(network: Network, gather: float, total: float) -> None:
    assert network.gather_s(8, 10) == pytest.approx(gather)
    # small sums go in rounds where all pairs can talk
    rounds = math.inf if network.shape == "ring" else 3 * network.round_s(8, 10)
    assert network.sum_s(8, 10) == pytest.approx(min(total, rounds))
    assert network.sum_s(1, 10) == network.gather_s(1, 10) == 0


def test_three_machines_send_what_the_third_lacks() -> None:
    assert SWITCH.gather_s(3, 10) == pytest.approx(2 * 0.1 + 0.1 + 0.1)


@pytest.mark.parametrize(
    ("data", "perturb", "states", "messages"),
    [
        (1, 1, 8, 0.0),
        (1, 2, 4, 0.1 + 0.16 * 4 + 0.1 + 0.18),
        (2, 1, 4, 0.1 + 0.16 * 4 + 0.1 + 0.18),
        (4, 2, 1, 3 * 0.1 + 7 * 0.16 + 3 * 0.1 + 7 * 0.18),
    ],
)
def test_a_zeroth_order_step_by_hand(data: int, perturb: int, states: int, messages: float) -> None:
    """4 rows at 2 points; of a machine 16 bytes for each state, then 18."""
    expected = 3 * (0.5 + 0.25 * states + 0.1) + 0.125 * states + messages
    assert zeroth_order_s(MEZO, ASSUMED, SWITCH, 4, 2, data, perturb) == pytest.approx(expected)


def test_the_last_machine_has_no_smaller_share() -> None:
    """5 rows on 2 machines take as long as 6."""
    assert zeroth_order_s(MEZO, ASSUMED, NONE, 5, 2, data=2) == pytest.approx(
        zeroth_order_s(MEZO, ASSUMED, NONE, 6, 2, data=2)
    )


def test_sums_of_gradients_are_hidden_behind_the_backward_pass() -> None:
    forward, backward = 3 * (0.5 + 0.5) + 0.25, 0.5 + 1.0  # two rows on each of two machines
    fast = Network("", 0.0, 400.0, 0.0, "switch")  # 40 bytes: 0.1 s, and a layer takes 1.5 s
    assert backprop_s(MEBP, ASSUMED, fast, 4, 2) == pytest.approx(
        forward + 3 * backward + max(0.3, 0.1 + 0.1) + 18 / 400
    )
    slow = Network("", 0.0, 10.0, 0.0, "switch")  # 4 s: each sum waits for that before
    assert backprop_s(MEBP, ASSUMED, slow, 4, 2) == pytest.approx(
        forward + backward + 3 * 4.0 + 0.1 + 1.8
    )
    alone = backprop_s(MEBP, ASSUMED, slow, 4)
    assert alone == pytest.approx(3 * (0.5 + 1) + 0.5 + 3 * (0.5 + 2) + 0.3)


def test_what_is_not_divided_bounds_the_speed_up() -> None:
    found = {
        (each["way"], each["network"], each["machines"]): each
        for each in simulate(MEZO, MEBP, ASSUMED)
    }
    ddp = found["DDP", "no network", 64]
    alone = 3 * (0.5 + 0.25 * 128 + 0.1) + 0.125 * 128
    assert ddp["speedup"] == pytest.approx(alone / (3 * (0.5 + 0.5 + 0.1) + 0.25))
    assert ddp["efficiency"] == pytest.approx(ddp["speedup"] / 64)
    assert ("PertP", "no network", 4) not in found  # MeZO has two points
    assert ("PertP, many points", "Wi-Fi", 64) in found
    for way, network, machines in found:  # a network never helps
        compute = found[way, "no network", machines]
        assert found[way, network, machines]["speedup"] <= compute["speedup"] <= machines + 1e-9


def test_the_simulation_is_near_the_recorded_ratio() -> None:
    """Two processes beside one, which Linux gave as much of the CPU as the two had together."""
    recorded = json.loads((RECORDED / "distzo2-at-once.json").read_bytes())["step_s"]
    (row,) = json.loads((RECORDED / "distzo2-simulation.json").read_bytes())["rows"]
    mezo = msgspec.convert(row["times"]["mezo"], Times)
    one, pertp, ddp = (statistics.mean(recorded[way][1:]) for way in ("one", "pertp", "ddp"))
    rows, points = 2, 2
    alone = zeroth_order_s(mezo, Assumptions(), NONE, rows, points)
    for measured, split in ((2 * one / pertp, (1, 2)), (2 * one / ddp, (2, 1))):
        simulated = alone / zeroth_order_s(mezo, Assumptions(), NONE, rows, points, *split)
        assert simulated == pytest.approx(measured, rel=0.1)


def test_times_of_two_numbers_of_rows() -> None:
    assert line_through((2, 1.5), (8, 3.0)) == Line(1.0, 0.25)
    assert line_through((2, 1.0), (8, 8.0)) == Line(0.0, 1.0)
    assert line_through((2, 1.0), (8, 0.5)) == Line(0.75, 0.0)
    assert sliced_bytes(100, 4, 2) == 150.0


def test_the_parts_of_a_profile() -> None:
    def layer(forward: float, backward: float) -> dict[str, Any]:
        return {
            "forward_s": forward,
            "forward_owners_s": {"noise": 0.25, "update": 0.25, "unpack": 1.0},
            "backward_s": backward,
            "backward_owners_s": {"optimizer": 0.5},
        }

    parts = _parts([{"forward_s": 0.25}, layer(2.5, 3.5), layer(3.5, 4.5), {"forward_s": 1.0}])
    assert parts == {"forward": 2.5, "backward": 3.5, "update": 1.0, "head": 1.25}


# --- the benchmark ------------------------------------------------------------------------------


def test_each_row_has_its_option_and_its_processes() -> None:
    options = {each.name: (each.settings.get("parallel"), each.ranks) for each in SHARINGS}
    assert options == {
        "one worker": (None, 1),
        "PertP": ("perturb=2", 2),
        "DDP": ("data=2", 2),
        "2D": ("data=2,perturb=2", 4),
        "MeBP, one worker": (None, 1),
        "MeBP, DDP": ("data=2", 2),
    }
    for each in SHARINGS:
        assert each.launcher[:2] == ["env", "OPENBLAS_NUM_THREADS=1"]
        assert each.launcher[-2:] == (["-n", str(each.ranks)] if each.ranks > 1 else each.launcher)


def made_up(
    way: str, ranks: int, step_s: float, batch: int = 4, simulated_s: float | None = None
) -> dict[str, Any]:
    alone = "one worker" in way
    return {
        "name": f"batch {batch}, {way}",
        "way": way,
        "ranks": ranks,
        "batch": batch,
        "tokens_per_step": batch * 64,
        "failed": None,
        "step_s": {"median": step_s, "low": step_s, "high": step_s},
        "peak_footprint_bytes": 1e8,
        "speedup": None if alone else {"median": 8 / step_s, "low": 1.0, "high": 2.0},
        "memory": None if alone else 1.0,
        "other_cores": {"median": 0.25, "low": 0.0, "high": 1.0},
        "simulated_s": simulated_s,
        "processes": [],
    }


ROW: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "tokens": 64,
    "failed": None,
    "cores": 2,
    "weight_bytes": 100_000_000,
    "variants": [
        made_up("one worker", 1, 8.0),
        made_up("PertP", 2, 5.0),
        made_up("DDP", 2, 4.0, simulated_s=4.25),
        made_up("2D", 4, 2.0),
        made_up("PertP", 2, 2.0, batch=2),
        {**made_up("MeBP, DDP", 2, 1.0), "step_s": None, "failed": "no such option"},
    ],
    "times": None,
    "notes": ["no simulation: it was too late"],
}


def test_the_papers_ratios_stand_beside_ours() -> None:
    steps, by_batch, transfers, sliced, networks = DISTZO2_TABLES.tables([ROW])
    lines = {(line[2], line[3]): line for line in steps.rows}
    assert lines["4", "one worker"][4:11] == ("1", "8.00", "8.00-8.00", "32.0", "", "", "100.0")
    ddp = lines["4", "DDP"]
    assert ddp[7:14] == ("64.0", "x2.00", "x1.00-x2.00", "100.0", "x1.00", "0.2", "4.25")
    assert ddp[14:] == ("x1.70", "x1.68-x1.75", "x0.89")
    assert lines["4", "2D"][4] == "4, oversubscribed"
    assert lines["2", "PertP"][14:] == ("not in the paper", "", "")
    assert lines["4", "MeBP, DDP"][5] == "did not run"
    assert by_batch.rows[1:] == [
        (*("qwen2.5-0.5b", "64", "4", "51.2", "64.0", "128.0"), "x0.80", "x2.00", "x1.10", "x1.92")
    ]
    assert len(transfers.rows) == len(sliced.rows) == 1  # nothing was measured
    assert networks.title.startswith("SIMULATION") and networks.rows[1][3:5] == ("2", "50.0")


def test_slices_are_compared_with_whole_bundles() -> None:
    def rate(median: float) -> dict[str, float]:
        return {"median": median, "low": median, "high": 2 * median}

    names = ("upload", "upload, sliced", "upload, ratio")
    rates = {each: rate(2.0**at) for at, each in enumerate(names)}
    rates |= {name.replace("up", "off"): each for name, each in rates.items()}
    steps = [
        {
            **made_up("slices", 2, step_s),
            "method": "mebp",
            "longer": longer,
            "received_bytes_per_step": 90e6,
        }
        for step_s, longer in ((8.0, None), (9.0, rate(1.125)))
    ]
    found = {"ranks": 2, "disk_bytes": 51e6, "transfers": rates, "steps": steps}
    _, _, transfers, sliced, _ = DISTZO2_TABLES.tables([{**ROW, "sliced": found}])
    cells = ("1.00", "2.00", "x4.00", "x4.00-x8.00", "x3.99", "x2.79-x4.80")
    assert transfers.rows[1][:8] == ("qwen2.5-0.5b", "2", *cells)
    assert transfers.rows[1][12:] == ("x4.44", "x3.55-x4.76")
    assert sliced.rows[1][6:] == ("", "", "100.0", "100.0", "90.0", "0.0")
    assert sliced.rows[2][6:] == ("x1.12", "x1.12-x2.25", "100.0", "51.0", "90.0", "100.0")


def test_the_simulation_is_called_so_wherever_it_is_shown() -> None:
    times = {"mezo": asdict(MEZO), "mebp": asdict(MEBP)}
    tables = DISTZO2_TABLES.tables([{**ROW, "times": times}])
    assert [table.title.partition(":")[0].partition(" (")[0] for table in tables] == [
        *("Measured", "Measured"),
        *(["SIMULATION, nothing of it is measured"] * 2),
        *("Measured", "Measured", "SIMULATION, nothing of it is measured"),
    ]
    speedups, pays = tables[2:4]
    assert speedups.rows[1][:2] == ("no network", "2") and speedups.rows[-1][:3] == (
        *("Wi-Fi", "64"),
        "-",
    )
    assert [line[0] for line in pays.rows[1:]] == list(speedups.rows[0][2:])
    assert pays.rows[1][1] == "2"  # MeZO's points
    facts = DISTZO2_TABLES.facts([{**ROW, "times": times}])["simulation"]
    assert facts["what"].startswith("SIMULATION") and len(facts["rows"]) == len(NETWORKS) * 25
    assert facts["assumptions"]["networks"][-1]["name"] == "Wi-Fi"


def test_published_figures_agree_with_what_the_paper_says_of_them() -> None:
    large = SHARED["OPT-175B"].tokens_per_s
    assert large[3] / large[0] == pytest.approx(3, abs=0.1)  # "a 3x speedup over ZO2"
    assert all(each.tokens_per_s[1] > each.tokens_per_s[2] for each in SHARED.values())
    for model, speeds in SHARED_BY_BATCH[4].items():  # both tables have batch 4
        assert SHARED[model].tokens_per_s[1:] == speeds


@NEEDS_MPI
def test_processes_are_measured_and_the_parts_of_one_simulate_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distzo2, "BATCHES", (2,))
    monkeypatch.setattr(distzo2, "SHARINGS", SHARINGS[:2])
    monkeypatch.setattr(distzo2, "measure", lambda *given: None)
    given = {"models": "tiny-qwen2", "seq_lens": "16", "steps": 2, "repeats": 1}
    output = tmp_path / "found.json"
    config = BenchConfig(name="distzo2", bundles=str(tmp_path / "b"), output=str(output), **given)
    report = bench(config, lambda text: None)
    (row,) = report["rows"]
    one, pertp = row["variants"]
    assert row["notes"] == [] and one["failed"] is pertp["failed"] is None
    assert pertp["speedup"]["median"] > 0 and pertp["simulated_s"] > 0
    (peaks,) = (process["worker_peak_bytes"] for process in pertp["processes"])
    (sent_bytes,) = (process["sent_bytes_per_step"] for process in pertp["processes"])
    assert sent_bytes == sum(messages_bytes(Assumptions(), 2))  # two rows at one point
    assert len(peaks) == 2 and min(peaks) > 1e7 and pertp["peak_footprint_bytes"] >= max(peaks)
    assert one["processes"][0]["worker_peak_bytes"] == []
    assert row["times"]["mezo"]["layers"] == row["times"]["mebp"]["layers"] == 2
    assert "SIMULATION" in to_text(report) and report == json.loads(output.read_text())


@NEEDS_MPI
@pytest.mark.slow
def test_slices_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distzo2, "BATCHES", ())
    given = {"models": "tiny-qwen2", "seq_lens": "16", "steps": 2, "repeats": 1}
    output = str(tmp_path / "found.json")
    config = BenchConfig(name="distzo2", bundles=str(tmp_path / "b"), output=output, **given)
    (row,) = bench(config, lambda text: None)["rows"]
    assert row["notes"] == []
    for each in row["sliced"]["steps"]:
        assert each["failed"] is None and each["step_s"]["median"] > 0
        assert (each["received_bytes_per_step"] > 0) == (each["way"] != "whole")
    assert all(each["low"] > 0 for each in row["sliced"]["transfers"].values())
