"""The tables of `ondevice bench distzo2`: measured processes, and the simulation, called so."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.bench.benchmark import (
    NOT_PUBLISHED,
    Cells,
    Row,
    around,
    megabytes,
    place,
    seconds,
    times,
    variants_table,
)
from harness.bench.published import SHARED, SHARED_BY_BATCH, SLICED
from harness.bench.simulation import NETWORKS, Assumptions, Times, simulate, sliced_bytes
from harness.measure.repeats import spread
from harness.report.table import Table
from runtime.config.methods import USUAL

SIMULATION = "SIMULATION, nothing of it is measured"
EXACT, FORWARD_ONLY = USUAL  # MeBP and MeZO
PUBLISHED = {"PertP": 1, "DDP": 2, "2D": 3}  # places in `published.Shared`; 0 is one worker
PUBLISHED_BATCH = 4  # the only batch with a figure for one GPU


def times_of(parts: Mapping[str, Any] | None) -> dict[str, Times] | None:
    return None if parts is None else msgspec.convert(parts, dict[str, Times])


def _simulated(row: Row, assumed: Assumptions) -> list[dict[str, Any]]:
    of = times_of(row.get("times"))
    return [] if of is None else list(simulate(of[FORWARD_ONLY], of[EXACT], assumed))


def facts(rows: Sequence[Row]) -> dict[str, Any]:
    assumed = Assumptions()
    return {
        "simulation": {
            "what": SIMULATION,
            "assumptions": msgspec.json.decode(msgspec.json.encode(assumed)),
            "rows": [
                {"model": row["model"], "tokens": row["tokens"], **each}
                for row in rows
                for each in _simulated(row, assumed)
            ],
        }
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    head = (
        "batch", "way", "ranks", "s/step", "low-high", "tokens/s", "to one", "low-high",
        "MB/rank", "to one", "other cores", "simulated s", "paper: to one", "low-high", "MB",
    )  # fmt: skip
    steps = variants_table(
        "Measured (Table 1): processes of this machine with one BLAS thread each",
        head, rows, 4, _cells,
    )  # fmt: skip
    simulated = {id(row): _simulated(row, Assumptions()) for row in rows}
    return [
        steps,
        _by_batch(rows),
        *(_speedups(row, simulated[id(row)]) for row in rows if simulated[id(row)]),
        *(_pays(row, simulated[id(row)]) for row in rows if simulated[id(row)]),
        _transfers(rows),
        _sliced(rows),
        _sliced_networks(rows),
    ]


def _cells(row: Row, variant: dict[str, Any]) -> Cells:
    ranks = variant["ranks"]
    words = f"{ranks}, oversubscribed" if ranks > row["cores"] else str(ranks)
    head = (str(variant["batch"]), variant["way"], words)
    papers = _papers(variant)
    if variant["step_s"] is None:
        return (*head, "did not run", *[""] * 8, *papers)
    alone = variant["speedup"] is None
    others, simulated = variant["other_cores"], variant["simulated_s"]
    return (
        *head,
        *around(variant["step_s"], seconds),
        _tokens_per_s(variant),
        *(("", "") if alone else around(variant["speedup"], times)),
        megabytes(variant["peak_footprint_bytes"]),
        "" if alone else times(variant["memory"]),
        "-" if others is None else f"{others['median']:.1f}",
        "-" if simulated is None else seconds(simulated),
        *papers,
    )


def _tokens_per_s(variant: Mapping[str, Any]) -> str:
    if variant["step_s"] is None:
        return "-"
    return f"{variant['tokens_per_step'] / variant['step_s']['median']:.1f}"


def _papers(variant: Mapping[str, Any]) -> Cells:
    at = PUBLISHED.get(variant["way"])
    if at is None or variant["batch"] != PUBLISHED_BATCH:
        return (NOT_PUBLISHED, "", "")
    speed = [shared.tokens_per_s[at] / shared.tokens_per_s[0] for shared in SHARED.values()]
    peak = [shared.peak_mb[at] / shared.peak_mb[0] for shared in SHARED.values()]
    return (*around(spread(speed), times), times(statistics.median(peak)))


def _by_batch(rows: Sequence[Row]) -> Table:
    """DistZO2's Table 2, with the ratios that do not depend on the machine beside the paper's."""
    ways = [*PUBLISHED]
    ratios = ("PertP to DDP", "2D to DDP")
    lines: list[Cells] = [
        ("model", "tokens", "batch", *ways, *ratios, *(f"paper: {name}" for name in ratios))
    ]
    for row in rows:
        of = {(each["batch"], each["way"]): each for each in row.get("variants", ())}
        for batch in dict.fromkeys(batch for batch, _ in of):
            here = [of[batch, way] for way in ways if (batch, way) in of]
            if len(here) < len(ways):
                continue
            medians = [each["step_s"] and each["step_s"]["median"] for each in here]
            pertp, ddp, both = medians
            ours = [ddp / other if ddp and other else None for other in (pertp, both)]
            lines.append(
                (
                    *(*place(row), str(batch), *map(_tokens_per_s, here)),
                    *(*map(times, ours), *_papers_by_batch(batch)),
                )
            )
    return Table("Measured (Table 2): tokens per second by batch", lines, 3)


def _papers_by_batch(batch: int) -> Cells:
    if batch not in SHARED_BY_BATCH:
        return (NOT_PUBLISHED, "")
    speeds = SHARED_BY_BATCH[batch].values()
    pertp, both = ([each[at] / each[1] for each in speeds] for at in (0, 2))
    return times(statistics.median(pertp)), times(statistics.median(both))


def _speedups(row: Row, simulated: Sequence[Mapping[str, Any]]) -> Table:
    of = {(each["network"], each["machines"], each["way"]): each for each in simulated}
    ways = dict.fromkeys(each["way"] for each in simulated)
    lines: list[Cells] = [("network", "machines", *ways)]
    for network, machines in dict.fromkeys((name, count) for name, count, _ in of):
        cells = [_speedup(of.get((network, machines, way))) for way in ways]
        lines.append((network, str(machines), *cells))
    lines[1:] = sorted(lines[1:], key=lambda line: [each.name for each in NETWORKS].index(line[0]))
    return Table(f"{SIMULATION}: speed-up and efficiency, {_where(row)}", lines, 1)


def _where(row: Row) -> str:
    return f"{row['model']} at {row['tokens']} tokens"


def _speedup(simulated: Mapping[str, Any] | None) -> str:
    if simulated is None:
        return "-"
    return f"{times(simulated['speedup'])} {simulated['efficiency']:.0%}"


def _pays(row: Row, simulated: Sequence[Mapping[str, Any]]) -> Table:
    """The most machines that are at least half as fast as so many ones alone."""
    ways = dict.fromkeys(each["way"] for each in simulated)
    networks = dict.fromkeys(each["network"] for each in simulated)
    least = Assumptions().pays
    lines: list[Cells] = [("way", *networks)]
    for way in ways:
        cells = []
        for network in networks:
            pays = [
                each["machines"]
                for each in simulated
                if (each["way"], each["network"]) == (way, network) and each["efficiency"] >= least
            ]
            cells.append(str(max(pays, default=1)))
        lines.append((way, *cells))
    title = f"{SIMULATION}: most machines with an efficiency of {least:.0%}, {_where(row)}"
    return Table(title, lines, 1)


def _transfers(rows: Sequence[Row]) -> Table:
    """DistZO2's Table 3: layers that reach the workers, and leave them."""
    kinds = ("upload", "offload")
    of_kind = ("sliced", "ratio", "low-high", "paper: ratio", "low-high")
    lines: list[Cells] = [("model", "ranks", "upload", *of_kind, "offload", *of_kind)]
    for row in rows:
        if (sliced := row.get("sliced")) is None:
            continue
        cells: Cells = (row["model"], str(sliced["ranks"]))
        for at, kind in enumerate(kinds):
            found = sliced["transfers"]
            rates = (found[kind], found[f"{kind}, sliced"])
            papers = spread([each[2 * at + 1] / each[2 * at] for each in SLICED.values()])
            cells += tuple(f"{rate['median']:.2f}" for rate in rates)
            cells += (*around(found[f"{kind}, ratio"], times), *around(papers, times))
        lines.append(cells)
    return Table(
        "Measured (Table 3): billions of parameters per second to all ranks, and from them",
        lines,
        1,
    )


def _sliced(rows: Sequence[Row]) -> Table:
    """Steps of processes that hold a slice of the weights each."""
    lines: list[Cells] = [
        ("model", "tokens", "method", "weights", "s/step", "low-high", "to whole", "low-high",
         "MB/rank", "MB on disk", "MB received a step", "by arithmetic")
    ]  # fmt: skip
    for row in rows:
        if (sliced := row.get("sliced")) is None:
            continue
        for each in sliced["steps"]:
            whole = each["longer"] is None
            disk = row["weight_bytes"] if whole else sliced["disk_bytes"]
            passes = 2 if each["method"] == EXACT else 1
            least = 0 if whole else sliced_bytes(row["weight_bytes"], sliced["ranks"], passes)
            cells = (*place(row), each["method"], each["way"])
            if each["step_s"] is None:
                lines.append((*cells, "did not run", *[""] * 7))
                continue
            lines.append(
                (
                    *(*cells, *around(each["step_s"], seconds)),
                    *(("", "") if whole else around(each["longer"], times)),
                    *(megabytes(each["peak_footprint_bytes"]), megabytes(disk)),
                    *map(megabytes, (each["received_bytes_per_step"], least)),
                )
            )
    return Table("Measured: steps of two ranks with a half of the weights each", lines, 4)


def _sliced_networks(rows: Sequence[Row]) -> Table:
    """The seconds that slices take on a network."""
    networks = [network for network in NETWORKS if network.latency_s]
    lines: list[Cells] = [
        ("model", "tokens", "method", "machines", "MB to each", *(each.name for each in networks))
    ]
    for row in rows:
        if "weight_bytes" not in row:
            continue
        for method, passes in (("mezo", 1), ("mebp", 2)):  # over the weights, in a step
            for machines in Assumptions().machines[:3]:
                size = sliced_bytes(row["weight_bytes"], machines, passes)
                least = [f"{seconds(size / network.bytes_per_s)} s" for network in networks]
                lines.append((*place(row), method, str(machines), megabytes(size), *least))
    return Table(
        f"{SIMULATION}: bytes of a step with weights in slices, and the seconds that they take at "
        "least",
        lines,
        3,
    )
