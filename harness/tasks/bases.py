"""What a base does to learning: the same rows and steps from several bundles of one model.

    python -m harness.tasks.bases train BUNDLE... --data DATA -o DIR [--seeds 0,1,2] [OPTIONS]
    python -m harness.tasks.bases draw DIR... -o PICTURE.png

`train` takes the options of `ondevice train`, and writes the run of each bundle and seed to
DIR/BUNDLE-SEED. Finished runs are kept and interrupted ones resumed, so the same command continues.
`draw` writes a picture with the held-out losses of every DIR, the median over seeds with their
range, and the loss of each seed beside it as JSON. It also draws what
`python -m tests.oracles.dense RUN` wrote for a run: the same steps on mlx-lm's own model in
float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.measure.command import ondevice
from runtime.core.errors import OnDeviceError, UsageError
from runtime.core.files import write_atomic

DENSE = "float32, dense"
LOG_FROM = 20  # the axis is logarithmic if the largest loss is so many times the smallest
Curve = dict[int, float]  # a held-out loss by step
Curves = Mapping[str, Sequence[Curve]]  # one for each seed, by base


def train(
    bundles: Sequence[Path], data: str, out: Path, seeds: Sequence[int], options: Sequence[str]
) -> None:
    """Train every bundle with every seed; the runs lie in `out`."""
    for seed in seeds:
        for bundle in bundles:
            run = out / f"{bundle.name}-{seed}"
            if (run / "summary.json").exists():
                continue
            if run.exists():
                ondevice("train", f"--resume={run}")
            else:
                fixed = (f"--data={data}", f"--seed={seed}", f"--output={run}")
                ondevice("train", str(bundle), *fixed, *options)
            print(run)


def evaluations(file: Path) -> Curve:
    """The held-out losses by step in a run's evaluations.json; those before training at step 0.

    Raises:
        UsageError: the run was not evaluated.
    """
    if not file.exists():
        raise UsageError(f"{file.parent} has no held-out loss: train with held-out data")
    found = json.loads(file.read_text())
    steps = {"before": 0, "after": found["after"]["step"]}
    return {steps[key] if key in steps else int(key): one["loss"] for key, one in found.items()}


def curves(out: Path) -> Curves:
    """The curves of all runs in a folder, by base; those of dense runs under `DENSE`.

    Raises:
        UsageError: there is no run.
    """
    found: dict[str, list[Curve]] = defaultdict(list)
    for run in sorted(out.iterdir()):
        if (run / "summary.json").exists():
            found[run.name.rpartition("-")[0]].append(evaluations(run / "evaluations.json"))
        if (run / "dense.json").exists():
            dense: dict[str, Any] = json.loads((run / "dense.json").read_text())
            steps = {int(step): one["loss"] for step, one in dense["by_step"].items()}
            found[DENSE].append({0: dense["before"]["loss"], **steps})
    if not found:
        raise UsageError(f"{out} holds no finished run")
    if DENSE in found:
        found[DENSE] = found.pop(DENSE)  # the last in the legend
    return found


def draw(folders: Sequence[Path], target: Path) -> None:
    """Write the picture and its figures, `target` with the suffix .json."""
    from harness.tasks.figure import new_figure, png, style

    measured = {folder.name: curves(folder) for folder in folders}
    bases = list(dict.fromkeys(base for found in measured.values() for base in found))
    figure, axes = new_figure(len(folders), 3.9)
    for one, (task, found) in zip(axes, measured.items(), strict=True):
        for base, runs in found.items():
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            values = [[run[step] for run in runs] for step in steps]
            look = style(bases.index(base))
            middle = [statistics.median(each) for each in values]
            one.plot(steps, middle, label=base, linewidth=1.6, markersize=4, **look)
            if len(runs) > 1:
                low, high = [min(each) for each in values], [max(each) for each in values]
                one.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
        losses = [loss for runs in found.values() for run in runs for loss in run.values()]
        if max(losses) > LOG_FROM * min(losses):
            one.set_yscale("log")
            one.yaxis.set_major_formatter("{x:g}")
        one.set_title(task)
        one.set_xlabel("steps")
    axes[0].set_ylabel("held-out loss (nats per token)")
    lines = {str(line.get_label()): line for one in axes for line in one.get_lines()}
    shown = [lines[base] for base in bases]
    figure.legend(handles=shown, frameon=False, loc="outside lower center", ncols=len(bases))
    write_atomic(target, png(figure))
    text = json.dumps(measured, indent=1)
    write_atomic(target.with_suffix(".json"), (text + "\n").encode())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train the same task from several bundles")
    training.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    training.add_argument("--data", required=True, help="as of `ondevice train`")
    training.add_argument(
        "--seeds", type=_seeds, default=[0], help="separated by commas (default: 0)"
    )
    drawing = commands.add_parser("draw", help="draw the curves of folders that `train` wrote")
    drawing.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    for one in (training, drawing):
        one.add_argument("-o", "--output", type=Path, required=True)
    arguments, options = parser.parse_known_args(argv)
    if arguments.command == "draw":
        if options:
            parser.error(f"unknown: {' '.join(options)}")
        if len({folder.name for folder in arguments.folders}) < len(arguments.folders):
            parser.error("two of the folders have one name, which is their heading")
        try:
            draw(arguments.folders, arguments.output)
        except OnDeviceError as problem:
            parser.error(str(problem))
        return
    bundles: list[Path] = arguments.bundles
    if len({bundle.name for bundle in bundles}) < len(bundles):
        parser.error("two of the bundles have one name, by which their runs would be told apart")
    try:
        train(bundles, arguments.data, arguments.output, arguments.seeds, options)
    except OnDeviceError as problem:  # its process has printed it
        sys.exit(problem.exit_code)


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


if __name__ == "__main__":
    main()
