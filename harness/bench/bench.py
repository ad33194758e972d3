"""`ondevice bench`: the benchmarks by name, and running one of them.

Every figure comes from fresh processes, and variants alternate. Invariant: the JSON is rewritten
after each row, and a signal leaves out no process that was finished; `complete` says whether it has
all of them. It names the machine, the versions, the commit and the command, and no path of this
machine.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from export.sources.random import PRESETS
from harness.bench.benchmark import Bench, Benchmark, failures, remarks
from harness.config.bench import BenchConfig, parts
from harness.measure.command import flag
from harness.measure.provenance import machine, provenance
from harness.measure.repeats import INTERRUPTED
from harness.report.chart import standalone
from runtime.core.errors import InterruptedRunError, UsageError
from runtime.core.files import storage_errors, write_atomic
from runtime.core.notes import Note
from runtime.core.paths import output_path
from runtime.core.units import counted, format_bytes

# where each benchmark stands in this package; it is imported when it is named, or listed
BENCHMARKS: dict[str, str] = {
    "mebp-table2": "mebp_tables.TABLE2",
    "curve": "budget_curve.CURVE",
    "peers": "peers.PEERS",
    "generation": "generation.GENERATION",
    "machine": "machine.MACHINE",
    "doctor": "doctor.DOCTOR",
}
LOCAL = ("bundles", "output", "python")  # paths of one machine


def bench(config: BenchConfig, note: Note) -> dict[str, Any]:
    """Run a benchmark and write its JSON and pictures; returns the content of the JSON.

    Raises:
        UsageError: no such benchmark or model, an option that it does not use, or the output has
            no folder.
        InterruptedRunError: a signal arrived; the JSON holds the finished processes.
    """
    benchmark = find(config.name)
    for name in filter(config.was_given, benchmark.unused):
        problem = f"bench {config.name} does not use it; leave it out"
        raise UsageError(f"{flag(name, getattr(config, name))}: {problem}")
    models = parts(config.models) or benchmark.models
    if unknown := [name for name in models if name not in PRESETS]:
        raise UsageError(f"no shapes for {', '.join(unknown)}; there are {', '.join(PRESETS)}")
    output = output_path(config.output or f"{config.name}.json").resolve()  # a link stays
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}; make it first")
    report = {
        "benchmark": config.name,
        "text": benchmark.text,
        "command": command(config),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "machine": machine(),
        "settings": {key: value for key, value in vars(config).items() if key not in LOCAL},
        "paper": benchmark.paper,
        "notes": list(benchmark.notes),
        "complete": False,
        "rows": [],
    }
    try:
        _measure(config, benchmark, models, output, report, note)
    except (InterruptedRunError, KeyboardInterrupt) as stop:
        raise InterruptedRunError(
            f"interrupted; the measurements are in {output}: {counted(len(report['rows']), 'row')}"
            if report["rows"]
            else "interrupted before anything was measured"
        ) from stop
    return report


def _measure(
    config: BenchConfig,
    benchmark: Benchmark,
    models: Sequence[str],
    output: Path,
    report: dict[str, Any],
    note: Note,
) -> None:
    bundles = Path(config.bundles)
    with storage_errors(bundles):
        bundles.mkdir(parents=True, exist_ok=True)
        # not in the system's temporary folder, which may be memory: scratch files would count
        runs = tempfile.TemporaryDirectory(dir=bundles, prefix=".runs-")
    with runs as scratch:
        budgets = parts(config.budget) or benchmark.budgets
        cases = dict.fromkeys(models, config.lengths or benchmark.lengths)
        for row in benchmark.rows(Bench(config, cases, budgets, Path(scratch), note)):
            report["rows"].append(row)
            _write(report, output)
            if any(variant["failed"] == INTERRUPTED for variant in row.get("variants", ())):
                raise InterruptedRunError
    report["complete"] = True
    report |= benchmark.facts(report["rows"])
    _write(report, output)
    for name, charts in benchmark.pictures(report["rows"]).items():
        write_atomic(output.with_name(f"{output.stem}-{name}.svg"), standalone(charts))


def _write(report: Mapping[str, Any], output: Path) -> None:
    write_atomic(output, (json.dumps(report, allow_nan=False, indent=1) + "\n").encode())


def find(name: str) -> Benchmark:
    """The benchmark of a name.

    Raises:
        UsageError: there is none, and the message lists them; or a part that it needs is missing.
    """
    if name not in BENCHMARKS:
        known = [f"{key}: {_text(key)}" for key in BENCHMARKS]
        problem = f"no benchmark {name!r}; there are" if name else "name a benchmark:"
        raise UsageError("\n  ".join([problem, *known]))
    module, _, value = BENCHMARKS[name].partition(".")
    benchmark: Benchmark = getattr(import_module(f"{__package__}.{module}"), value)
    return benchmark


def _text(name: str) -> str:
    """The subject of a benchmark, or the reason why it does not run here."""
    try:
        return find(name).text
    except UsageError as problem:
        return str(problem)


def to_text(report: Mapping[str, Any]) -> str:
    """The report as tables."""
    here, paper = report["machine"], report["paper"]
    lines = [
        f"{report['benchmark']}: {report['text']}",
        f"ours: {here['cpu']}, {here['cores']} cores, {format_bytes(here['memory_bytes'])}, "
        f"{here['platform']}; ondevice {report['version']}, commit {report['commit'] or 'unknown'}",
    ]
    if paper:
        lines.append(
            f"paper: {paper['device']}; {paper['paper']}, {paper['place']} ({paper['setting']})"
        )
    rows = report["rows"]
    tables = find(report["benchmark"]).tables(rows)
    notes = [*failures(rows), *remarks(rows), *report["notes"]]
    ending = "\n".join(f"- {note}" for note in notes)
    return "\n\n".join(["\n".join(lines), *(table.text() for table in tables), ending])


def command(config: BenchConfig) -> str:
    """The command line of a configuration, without defaults and without paths of this machine."""
    words = ["ondevice", "bench", config.name]
    for name, value in vars(config).items():
        if name not in (*LOCAL, config.positional) and config.was_given(name):
            words.append(flag(name, value))
    return shlex.join(words)
