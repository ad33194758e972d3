"""The commands: each checks its configuration, calls `export`, `runtime` or `harness`, and prints.

Each handler imports what it needs, so that help and errors come at once, and a training process
does not load the code of other commands.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ondevice.cli.progress import say, step_bar, task_bar
from ondevice.config.base import Config, flag, given, load
from ondevice.errors import BundleError, UsageError
from ondevice.units import format_bytes

if TYPE_CHECKING:
    from ondevice.config.evaluate import EvalConfig
    from runtime.planner.plan import Plan

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Command:
    """A command: its name, what it does in one line and in more, its options and its handler.

    `settings` is the class of its options, below `ondevice.config`: it is imported when the command
    is typed, so that a training process does not load the others. `resumes` says whether
    `--resume RUN` may take the place of all options.
    """

    name: str
    summary: str
    more: str
    settings: str
    run: Callable[[argparse.Namespace], None]
    resumes: bool = False

    @property
    def config(self) -> type[Config]:
        """The class of its options."""
        module, _, name = self.settings.partition(".")
        found: type[Config] = getattr(import_module(f"ondevice.config.{module}"), name)
        return found


def _load(cls: type[C], arguments: argparse.Namespace) -> C:
    return load(cls, arguments.config, given(arguments, cls))


def _prepare(keep_heap: bool = True) -> None:
    """Set the process up before MLX is imported; warn where that leaves it slow."""
    from runtime.system.backend import prepare

    found = prepare(keep_heap)
    if found.warning:
        _say(f"ondevice: warning: {found.warning}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _export(arguments: argparse.Namespace) -> None:
    from ondevice.config.export import ExportConfig

    config = _load(ExportConfig, arguments)
    _prepare(keep_heap=False)
    from export.pack import export_bundle
    from runtime.run.export_engine import ExportEngine
    from runtime.system.footprint import Meter
    from runtime.system.heap import trim_heap

    with (
        Meter(budget_bytes=config.budget_bytes, relieve=trim_heap) as meter,
        task_bar("step") as progress,
    ):
        bundle = export_bundle(
            config, progress, partial(ExportEngine, meter, config.budget_bytes, progress, _say)
        )
    manifest = bundle.manifest
    quality = manifest.quality
    facts = {
        "bundle": str(bundle.path),
        "weights_bytes": manifest.weights_nbytes,
        "bits_per_weight": manifest.bits_per_weight,
        "graphs_bytes": sum(graph.nbytes for graph in manifest.graphs.values()),
        "peak_footprint_bytes": meter.peak_bytes,
        "quality": None if quality is None else msgspec.to_builtins(quality),
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    print(
        f"{bundle.path}: {format_bytes(manifest.weights_nbytes)} of weights "
        f"({manifest.bits_per_weight:.2f} bits each), {len(manifest.graphs)} graphs, "
        f"peak footprint {format_bytes(meter.peak_bytes)}"
    )
    if quality is not None:
        print(quality.describe())
        if warning := quality.warning():
            _say(f"ondevice: warning: {warning}")


def _inspect(arguments: argparse.Namespace) -> None:
    from ondevice.config.inspect import InspectConfig

    config = _load(InspectConfig, arguments)
    from ondevice.bundle.store import open_bundle
    from ondevice.cli.describe import describe_bundle, facts_of

    bundle = open_bundle(config.bundle)
    if config.verify:
        bundle.verify()
    if arguments.json:
        print(json.dumps({**facts_of(bundle), "verified": config.verify}, indent=1))
        return
    print(describe_bundle(bundle))
    if config.verify:
        print("every file agrees with its checksum")


def _plan(arguments: argparse.Namespace) -> None:
    from ondevice.config.plan import PlanConfig

    config = _load(PlanConfig, arguments)
    _prepare()  # the plan counts the BLAS's threads
    from ondevice.bundle.store import open_bundle
    from ondevice.cli.describe import describe_plan
    from runtime.run.start import machine_of, plan_training
    from runtime.run.traced_graphs import with_graphs
    from runtime.system.footprint import Meter

    machine = machine_of(config.machine)
    # as in `_train`: the plan counts what the process has loaded
    with task_bar("row"), step_bar(), Meter():
        bundle = with_graphs(open_bundle(config.bundle), config.device, _say)
        plan = plan_training(config, bundle, machine)
    if plan.warning:
        _say(f"ondevice: warning: {plan.warning}")
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print(describe_plan(plan.to_json(), per_block=True))


def _data(arguments: argparse.Namespace) -> None:
    from ondevice.config.data import DataConfig

    config = _load(DataConfig, arguments)
    from ondevice.bundle.store import open_bundle
    from ondevice.cli.describe import describe_lengths, marked
    from runtime.data.overview import confined_overview

    bundle = open_bundle(config.bundle)
    found = confined_overview(config)
    buckets = bundle.manifest.buckets
    first = next(iter(found.reports.values()))
    if arguments.json:
        reports = msgspec.to_builtins(found.reports, str_keys=True)
        facts = {"buckets": list(buckets), "recommended": first.recommended()}
        facts["packing"] = msgspec.to_builtins(found.packing)
        print(json.dumps({"data": reports, **facts, "row": found.row}))
        return
    for name, report in found.reports.items():
        print(f"{name}: {report.describe(buckets)}\n")
    print(describe_lengths(first.recommended(), first.longest, buckets))
    if found.packing is not None:
        print(found.packing.describe())
    if found.row:
        text, means = marked(found.row, sys.stdout.isatty())
        print(f"\nrow {config.row}, with what is scored {means}:\n\n{text}")


def _train(arguments: argparse.Namespace) -> None:
    from ondevice.config.train import TrainConfig

    overrides = given(arguments, TrainConfig)
    if arguments.resume is not None:
        _check_resume(arguments, overrides)
        config = None
    else:
        config = _load(TrainConfig, arguments)
    _prepare()
    from ondevice.cli.describe import (
        describe_fit,
        describe_plan,
        describe_summary,
        describe_validation,
    )
    from runtime.run.events import Events
    from runtime.run.start import resume, train

    quiet = arguments.json

    def open_with(plan: Plan) -> None:
        facts = plan.to_json()
        if arguments.verbose:
            say(describe_plan(facts))
        if not quiet:
            say(describe_fit(facts))

    with task_bar("row") as evaluation, step_bar() as step:
        events = Events(
            plan=open_with,
            note=say,
            step=step,
            evaluation=evaluation,
            evaluated=lambda when, found: say(describe_validation(when, found)),
        )
        if config is None:
            summary = resume(arguments.resume, events, overrides)
        else:
            summary = train(config, events)
    if quiet:
        print(json.dumps(summary))
        return
    run = arguments.resume if config is None else config.output
    print(f"{describe_summary(summary)}\nthe run and its adapter are in {run}")


def _check_resume(arguments: argparse.Namespace, overrides: dict[str, Any]) -> None:
    """Refuse options beside `--resume` that would contradict the run's own."""
    from ondevice.config.train import CHANGEABLE

    own = set(overrides) - set(CHANGEABLE)
    odd = [flag(name) for name in sorted(own)]
    if odd or arguments.config:
        raise UsageError(
            "--resume takes the run's own settings, --budget, --steps and --patience; leave out "
            f"{', '.join(odd) or '--config'}; to train with other settings, start another run with "
            f"--adapter {arguments.resume}"
        )


def _eval(arguments: argparse.Namespace) -> None:
    from ondevice.config.evaluate import EvalConfig

    config = _load(EvalConfig, arguments)
    _prepare()
    if config.source is not None:
        _eval_beside_source(config, config.source, arguments.json)
        return
    from ondevice.cli.describe import counted, describe_evaluation
    from runtime.run.evaluate import run_eval
    from runtime.run.events import Events

    with tempfile.TemporaryDirectory() as scratch, task_bar("row") as progress:
        result = run_eval(config, Path(scratch), Events(evaluation=progress, note=_say))
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{describe_evaluation(result)}, over {counted(result['tokens'], 'token')} in "
            f"{counted(result['rows'], 'row')}\n"
            f"peak footprint {format_bytes(result['peak_footprint_bytes'])}, budget "
            f"{format_bytes(result['budget_bytes'])}"
        )
    if result["loss"] is None:
        adapter = "" if config.adapter is None else f" with the adapter {config.adapter}"
        raise BundleError(
            f"{config.bundle}{adapter} gives {result['rows_not_finite']} of {result['rows']} rows "
            "a loss that is not finite: weights are not numbers, or too large; export the model "
            "again, or leave out the adapter"
        )


def _eval_beside_source(config: EvalConfig, source: str, as_json: bool) -> None:
    """Compare the bundle's predictions with those of the checkpoint that it came from."""
    from export.original import original_of
    from export.sources.open import open_checkpoint
    from runtime.data.reading import reading_of
    from runtime.data.source import Source
    from runtime.run.export_engine import ExportEngine
    from runtime.run.open import open_checked
    from runtime.system.footprint import Meter
    from runtime.system.heap import trim_heap

    bundle = open_checked(config.bundle, config.device, _say)
    budget = config.budget_bytes
    seed = int(bundle.manifest.provenance.get("seed", 0))  # of random:PRESET
    with (
        open_checkpoint(source, seed=seed) as checkpoint,
        Meter(budget_bytes=budget, relieve=trim_heap) as meter,
        tempfile.TemporaryDirectory() as scratch,
        task_bar("block") as progress,
    ):
        engine = ExportEngine(meter, budget, progress, _say, Path(scratch))
        original = original_of(bundle, checkpoint)
        held_out = Source("eval.tokens", config.data, "valid", reading_of(config))
        rows = engine.first_rows(bundle, held_out, config.max_seq_length, config.eval_rows)
        quality = engine.compare(original, checkpoint, bundle, rows, config.data)
    if as_json:
        print(json.dumps(msgspec.to_builtins(quality)))
    else:
        print(quality.describe())


def _generate(arguments: argparse.Namespace) -> None:
    from ondevice.config.generate import GenerateConfig

    config = _load(GenerateConfig, arguments)
    _prepare()
    from runtime.run.generate import generate

    adapter = None if config.adapter is None else Path(config.adapter)
    pieces = generate(
        config.bundle, config.prompt, adapter, config.max_tokens, config.chat, config.device, _say
    )
    if arguments.json:
        print(json.dumps({"prompt": config.prompt, "text": "".join(pieces)}))
        return
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _compare(arguments: argparse.Namespace) -> None:
    from ondevice.config.compare import CompareConfig

    config = _load(CompareConfig, arguments)
    from harness.compare.compare import compare
    from harness.compare.report import to_text

    report = compare(config, _say)
    if arguments.json:
        print(json.dumps(report))
        return
    print(f"{to_text(report)}\n\nplots are in {Path(config.output) / 'compare.html'}")


def _report(arguments: argparse.Namespace) -> None:
    from ondevice.config.report import ReportConfig

    config = _load(ReportConfig, arguments)
    if config.samples:
        _prepare()
    from harness.compare.runs_page import write_page

    runs = write_page([Path(run) for run in config.runs], Path(config.output), config.samples)
    if arguments.json:
        print(json.dumps({"output": config.output, "runs": [run.name for run in runs]}))
        return
    print(f"the page of {', '.join(run.name for run in runs)} is {config.output}")


def _replay(arguments: argparse.Namespace) -> None:
    from ondevice.config.replay import ReplayConfig

    config = _load(ReplayConfig, arguments)
    _prepare()
    from runtime.run.replay import replay

    run = Path(config.run)
    output = run / "replayed" if config.output is None else Path(config.output)
    initial = None if config.initial is None else Path(config.initial)
    facts = replay(run, output, config.bundle, initial)
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(f"{facts['output']}: {facts['steps']} steps from a log of {facts['log_bytes']} bytes")
        if facts["best_step"] is not None:
            print(f"the adapter is that after step {facts['best_step']}, kept by --keep-best")
    if facts["identical"] is False:
        raise BundleError(
            f"{run} has other adapters after step {facts['saved_steps']} than its log leads to"
        )
    if facts["identical"] and not arguments.json:
        print(f"identical to the run's own adapters after step {facts['saved_steps']}")


def _trust(arguments: argparse.Namespace) -> None:
    from ondevice.config.trust import TrustConfig

    config = _load(TrustConfig, arguments)
    from ondevice.bundle.store import open_bundle
    from ondevice.bundle.trusted import are_trusted, trust_graphs
    from ondevice.cli.describe import describe_trust

    bundle = open_bundle(config.bundle)
    bundle.verify_small()
    manifest = bundle.manifest
    if not manifest.graphs:
        raise UsageError(f"{bundle.path} has no graphs; they are traced where it is used")
    known = are_trusted(manifest)
    if not known:
        _say(describe_trust(bundle))
        if not config.yes:
            _ask("Let them run? [y/N] ")
        trust_graphs(manifest, f"trusted by ondevice trust {bundle.path}")
    if arguments.json:
        facts = {"graphs": len(manifest.graphs), "trusted_before": known}
        print(json.dumps({"bundle": str(bundle.path), **facts}))
    else:
        print(f"{bundle.path}: its graphs {'could run already' if known else 'run from now on'}")


def _ask(question: str) -> None:
    """Go on only if the user says yes, at a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask at; pass --yes to answer yes")
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not trusted: nothing was changed")


def _bench(arguments: argparse.Namespace) -> None:
    from harness.bench.bench import bench, find, to_text
    from ondevice.config.bench import BenchConfig

    if arguments.config is None and "name" not in given(arguments, BenchConfig):
        find("")  # raises, with a list of them
    config = _load(BenchConfig, arguments)
    report = bench(config, _say)
    print(json.dumps(report) if arguments.json else to_text(report))


COMMANDS = (
    Command(
        "export",
        "convert a checkpoint to a bundle: quantized weights and graphs",
        "Training, evaluation and generation start from the bundle. The checkpoint is not needed "
        "after that.",
        "export.ExportConfig",
        _export,
    ),
    Command(
        "inspect",
        "show a bundle's model, adapters, graphs and quantization errors",
        "",
        "inspect.InspectConfig",
        _inspect,
    ),
    Command(
        "plan",
        "show how training would use a memory budget, without training",
        "Give the options that you would give to `ondevice train`.",
        "plan.PlanConfig",
        _plan,
    ),
    Command(
        "data",
        "show the rows that training would read, and which tokens count",
        "Nothing is trained. Give the options that you would give to `ondevice train`.",
        "data.DataConfig",
        _data,
    ),
    Command(
        "train",
        "fine-tune LoRA adapters under a memory budget, or resume a run",
        "The run directory is also an adapter of mlx-lm. Stopping with Ctrl-C saves the state.",
        "train.TrainConfig",
        _train,
        resumes=True,
    ),
    Command(
        "eval",
        "measure loss, perplexity and accuracy on held-out data",
        "",
        "evaluate.EvalConfig",
        _eval,
    ),
    Command(
        "generate",
        "continue a prompt, with or without an adapter",
        "Takes the most likely token each time. For looking at results: it is slow, since there is "
        "no key-value cache, and it has no memory budget.",
        "generate.GenerateConfig",
        _generate,
    ),
    Command(
        "compare",
        "compare training methods: quality against time and memory",
        "Tries learning rates, trains with each method, and writes tables, plots and an HTML page. "
        "The same command goes on where it was interrupted.",
        "compare.CompareConfig",
        _compare,
    ),
    Command(
        "report",
        "show one or more runs as a page of HTML",
        "The page holds losses, footprints, times and settings, and needs no network. --samples "
        "adds what the model says before and after training.",
        "report.ReportConfig",
        _report,
    ),
    Command(
        "replay",
        "rebuild the adapter of a MeZO run from its log",
        "Checks that the result is the run's own adapter, bit for bit.",
        "replay.ReplayConfig",
        _replay,
    ),
    Command(
        "trust",
        "let a bundle's own graphs run on this machine",
        "Graphs from elsewhere do not run: they are traced again from the model's configuration. "
        "This is for machines without mlx-lm, which does the tracing.",
        "trust.TrustConfig",
        _trust,
    ),
    Command(
        "bench",
        "run a benchmark on this machine; without a name, list them",
        "Every figure is measured in fresh processes.",
        "bench.BenchConfig",
        _bench,
    ),
)
