"""The command line: a thin shell over `export` and `runtime`, which it imports when needed."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ondevice import __version__
from ondevice.config.base import (
    EvalConfig,
    ExportConfig,
    PlanConfig,
    TrainConfig,
    add_arguments,
    given,
    load,
)
from ondevice.config.bench import BenchConfig
from ondevice.config.compare import CompareConfig
from ondevice.errors import BundleError, InterruptedRunError, OnDeviceError, UsageError
from ondevice.units import format_bytes

Handler = Callable[[argparse.Namespace], None]
# what mlx-lm and PEFT's users type
ELSEWHERE = {
    "--iters": "--steps",
    "--max-steps": "--steps",
    "--lr": "--learning-rate",
    "--adapter-path": "--adapter",
    "--lora-r": "--lora-rank",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return UsageError.exit_code
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        print(f"ondevice: {_not_known(unknown, arguments.parser)}", file=sys.stderr)
        return UsageError.exit_code
    handler: Handler = arguments.handler
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        handler(arguments)
    except OnDeviceError as problem:
        print(f"ondevice: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        print("ondevice: interrupted", file=sys.stderr)
        return InterruptedRunError.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone, as with `| head`
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ondevice",
        description="Fine-tune language models on this device, inside a memory budget.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ondevice {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, handler: Handler, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(handler=handler, parser=made)
        return made

    export = command("export", _export, "make a bundle from a checkpoint")
    export.add_argument(
        "-o", dest="output", metavar="BUNDLE", default=argparse.SUPPRESS, help="as --output"
    )
    add_arguments(export, ExportConfig)
    retrace = command("retrace", _retrace, "trace a bundle's graphs again for this MLX")
    retrace.add_argument("bundle")
    retrace.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    inspect = command("inspect", _inspect, "show what a bundle holds")
    inspect.add_argument("bundle")
    inspect.add_argument("--verify", action="store_true", help="check every checksum")
    inspect.add_argument("--json", action="store_true", help="print the manifest's facts as JSON")
    add_arguments(command("plan", _plan, "show what a budget buys"), PlanConfig)
    train = command("train", _train, "fine-tune LoRA adapters from a bundle")
    train.add_argument(
        "-o", dest="output", metavar="RUN", default=argparse.SUPPRESS, help="as --output"
    )
    train.add_argument("--resume", metavar="RUN", type=Path, help="go on with an interrupted run")
    add_arguments(train, TrainConfig)
    add_arguments(command("eval", _eval, "measure loss, perplexity and accuracy"), EvalConfig)
    replay = command("replay", _replay, "rebuild a MeZO run's adapter from its log")
    replay.add_argument("run", type=Path)
    replay.add_argument(
        "-o", dest="output", metavar="DIR", type=Path, help="where (default: RUN/replayed)"
    )
    replay.add_argument("--bundle", help="another place of the run's bundle")
    replay.add_argument("--initial", metavar="ADAPTER", type=Path, help="what the run started from")
    replay.add_argument("--json", action="store_true", help="print the result as JSON")
    compare = command("compare", _compare, "compare methods: what each spends to reach a quality")
    compare.add_argument(
        "-o", dest="output", metavar="DIR", default=argparse.SUPPRESS, help="as --output"
    )
    add_arguments(compare, CompareConfig)
    bench = command("bench", _bench, "measure on this machine, as the papers did")
    add_arguments(bench, BenchConfig)
    generate = command("generate", _generate, "continue a prompt, greedily")
    generate.add_argument("bundle")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--adapter", metavar="RUN", type=Path)
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument(
        "--chat", action="store_true", help="answer the prompt, by the model's chat template"
    )
    return parser


def _not_known(words: list[str], parser: argparse.ArgumentParser) -> str:
    """Which arguments a command does not take, and what may have been meant."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    there = [name for name in parser._option_string_actions if name.startswith("--")]
    near = [ELSEWHERE.get(flag) for flag in flags if ELSEWHERE.get(flag) in there]
    near += [name for flag in flags for name in difflib.get_close_matches(flag, there, n=1)]
    hint = f"; did you mean {' or '.join(dict.fromkeys(map(str, near)))}?" if near else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"


@contextlib.contextmanager
def _bar(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, made anew whenever the task changes."""
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        task = "weights" if total >= 1_000_000 else what
        if task not in bars:
            for bar in bars.values():
                bar.close()
            scale = total >= 1_000_000
            bars[task] = tqdm(
                total=total,
                desc=task,
                unit=unit if not scale else "",
                unit_scale=scale,
                leave=False,
                dynamic_ncols=True,
                disable=None,
            )
        bars[task].update(done - bars[task].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


def _export(arguments: argparse.Namespace) -> None:
    _prepare(keep_heap=False)
    config = load(ExportConfig, arguments.config, given(arguments, ExportConfig))
    from export.pack import export_bundle
    from runtime.system.footprint import Meter

    with Meter() as meter, _bar("graph") as progress:
        bundle = export_bundle(config, progress)
    manifest = bundle.manifest
    facts = {
        "bundle": str(bundle.path),
        "weights_bytes": manifest.weights_nbytes,
        "graphs_bytes": sum(graph.nbytes for graph in manifest.graphs.values()),
        "peak_footprint_bytes": meter.peak_bytes,
    }
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(
            f"{bundle.path}: {format_bytes(manifest.weights_nbytes)} of weights, "
            f"{len(manifest.graphs)} graphs, peak footprint {format_bytes(meter.peak_bytes)}"
        )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _retrace(arguments: argparse.Namespace) -> None:
    _prepare(keep_heap=False)
    from export.retrace import retrace

    with _bar("graph") as progress:
        bundle = retrace(arguments.bundle, arguments.device, progress)
    print(f"{bundle.path}: {len(bundle.manifest.graphs)} graphs for {bundle.manifest.device}")


def _inspect(arguments: argparse.Namespace) -> None:
    from ondevice.bundle.store import open_bundle
    from ondevice.cli.describe import describe_bundle, facts_of

    bundle = open_bundle(arguments.bundle)
    if arguments.verify:
        bundle.verify()
    if arguments.json:
        print(json.dumps({**facts_of(bundle), "verified": arguments.verify}, indent=1))
        return
    print(describe_bundle(bundle))
    if arguments.verify:
        print("every checksum agrees")


def _plan(arguments: argparse.Namespace) -> None:
    config = load(PlanConfig, arguments.config, given(arguments, PlanConfig))
    _prepare()  # how many threads the BLAS has is part of the plan
    from ondevice.bundle.store import open_bundle
    from ondevice.cli.describe import describe_plan
    from runtime.run.open import plan_of

    plan = plan_of(config, open_bundle(config.bundle))
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print(describe_plan(plan.to_json(), per_block=True))


def _train(arguments: argparse.Namespace) -> None:
    overrides = given(arguments, TrainConfig)
    budget = overrides.get("budget")
    if arguments.resume is not None and (set(overrides) - {"budget"} or arguments.config):
        odd = [f"--{name.replace('_', '-')}" for name in sorted(set(overrides) - {"budget"})]
        raise UsageError(
            "--resume takes the run's own settings (and --budget); leave out "
            f"{', '.join(odd) or '--config'}; to train a finished run further, start another with "
            f"--adapter {arguments.resume}"
        )
    config = None
    if arguments.resume is None:
        config = load(TrainConfig, arguments.config, overrides)
    _prepare()
    from ondevice.cli.describe import describe_plan, describe_summary
    from runtime.run.evaluate import Events
    from runtime.run.start import resume, train

    quiet = arguments.json
    with _bar("row") as evaluation, _steps() as step:
        events = Events(
            plan=lambda plan: None if quiet else _say(describe_plan(plan.to_json())),
            note=_say,
            step=step,
            evaluation=evaluation,
        )
        summary = (
            resume(arguments.resume, events, budget) if config is None else train(config, events)
        )
    if quiet:
        print(json.dumps(summary))
        return
    run = arguments.resume if config is None else config.output
    print(f"{describe_summary(summary)}\nthe run and its adapter are in {run}")


@contextlib.contextmanager
def _steps() -> Iterator[Callable[[dict[str, Any], int], None]]:
    """A progress bar of training steps, on stderr."""
    from tqdm import tqdm

    bars: list[Any] = []

    def show(entry: dict[str, Any], total: int) -> None:
        if not bars:
            bars.append(
                tqdm(
                    total=total,
                    initial=entry["step"] - 1,
                    desc="training",
                    unit="step",
                    dynamic_ncols=True,
                    disable=None,
                )
            )
        bars[0].set_postfix_str(
            f"loss {_loss(entry)}, {entry['tokens'] / entry['seconds']:.0f} tokens/s, "
            f"{format_bytes(entry['footprint_bytes'])}",
            refresh=False,
        )
        bars[0].update(1)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()


def _loss(entry: dict[str, Any]) -> str:
    return "not finite" if entry["loss"] is None else f"{entry['loss']:.3f}"


def _replay(arguments: argparse.Namespace) -> None:
    _prepare()
    from runtime.run.replay import replay

    output = arguments.output or arguments.run / "replayed"
    facts = replay(arguments.run, output, arguments.bundle, arguments.initial)
    if arguments.json:
        print(json.dumps(facts))
    else:
        print(f"{facts['output']}: {facts['steps']} steps from {facts['log_bytes']} bytes")
    if facts["identical"] is False:
        raise BundleError(
            f"{arguments.run} has other adapters after step {facts['saved_steps']} than its "
            "trajectory leads to"
        )
    if facts["identical"] and not arguments.json:
        print(f"identical to the run's own adapters after step {facts['saved_steps']}")


def _eval(arguments: argparse.Namespace) -> None:
    config = load(EvalConfig, arguments.config, given(arguments, EvalConfig))
    _prepare()
    from runtime.run.evaluate import Events, run_eval

    with tempfile.TemporaryDirectory() as scratch, _bar("row") as progress:
        result = run_eval(config, Path(scratch), Events(evaluation=progress))
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"loss {result['loss']:.4f}, perplexity {result['perplexity']:.3f}, next-token accuracy "
        f"{result['accuracy']:.2%}, rows exactly right {result['exact']:.2%} over "
        f"{result['tokens']} tokens in {result['rows']} rows\n"
        f"peak footprint {format_bytes(result['peak_footprint_bytes'])} of a budget of "
        f"{format_bytes(result['budget_bytes'])}"
    )


def _compare(arguments: argparse.Namespace) -> None:
    config = load(CompareConfig, arguments.config, given(arguments, CompareConfig))
    from harness.compare.compare import compare
    from harness.compare.report import to_text

    report = compare(config, _say)
    if arguments.json:
        print(json.dumps(report))
        return
    print(f"{to_text(report)}\n\nwith plots in {Path(config.output) / 'compare.html'}")


def _bench(arguments: argparse.Namespace) -> None:
    from harness.bench.bench import bench, find, to_text

    if arguments.config is None and "name" not in given(arguments, BenchConfig):
        find("")  # lists them
    config = load(BenchConfig, arguments.config, given(arguments, BenchConfig))

    report = bench(config, _say)
    print(json.dumps(report) if arguments.json else to_text(report))


def _generate(arguments: argparse.Namespace) -> None:
    if arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens {arguments.max_tokens} is less than 1")
    _prepare()
    from runtime.run.generate import generate

    for piece in generate(
        arguments.bundle,
        arguments.prompt,
        arguments.adapter,
        arguments.max_tokens,
        arguments.chat,
    ):
        print(piece, end="", flush=True)
    print()


def _prepare(keep_heap: bool = True) -> None:
    """Set the process up before MLX is imported, and say so where that leaves it slow."""
    from runtime.system.backend import prepare

    found = prepare(keep_heap)
    if found.warning:
        print(f"ondevice: warning: {found.warning}", file=sys.stderr)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
