"""The runs by which the defaults of `ondevice train` were chosen: small sets, rates and batches.

    python -m harness.tasks.defaults BUNDLE -o DIR --sst2 DIR [--minutes N] [--only support]

Each line of DIR/runs.jsonl is a run: its settings, its held-out loss and share of exact answers;
one of each set is the bundle without training. Runs that are there already are kept; the most
telling come first.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.measure.command import flag, ondevice
from harness.tasks.small_sets import write_sets

EPOCHS = 3
Settings = dict[str, Any]
OLD: Settings = {"steps": 100, "batch_size": 1, "learning_rate": 1e-4, "lr_schedule": "constant"}


def wanted(rows: dict[str, int]) -> Iterator[tuple[str, Settings]]:
    """The runs in their order: a set's name and the settings; `rows` are each set's."""

    def epochs(name: str, rate: float, batch: int, schedule: str = "linear") -> Settings:
        steps = math.ceil(EPOCHS * rows[name] / batch)
        return {
            "steps": steps, "batch_size": batch, "learning_rate": rate, "lr_schedule": schedule,
        }  # fmt: skip

    small = [name for name in rows if name != "support"]
    yield "support", OLD
    yield "support", epochs("support", 2e-4, 1)
    for rate in (2e-4, 5e-4, 1e-4):
        for name in small:
            yield name, epochs(name, rate, 1)
    for name in small:
        yield name, epochs(name, 5e-4, 4)
    yield "support", epochs("support", 5e-4, 1)
    for name in small:
        yield name, epochs(name, 2e-4, 1, "constant")


def measure(bundle: Path, name: str, data: Path, settings: Settings) -> dict[str, Any]:
    """Train once; returns the settings and what was measured."""
    start = time.time()
    run = data.parent / f"run-{name}-{'-'.join(map(str, settings.values()))}-{start:.0f}"
    flags = [flag(key, value) for key, value in settings.items()]
    valid = f"--data={data / 'valid.jsonl'}"
    facts: dict[str, Any] = {"bundle": bundle.name, "set": name, **settings}
    if settings:
        text = ondevice(
            "train", str(bundle), f"--data={data / 'train.jsonl'}", f"--output={run}", "--json",
            "--save-every=0", *flags,
        )  # fmt: skip
        summary = json.loads(text)
        facts |= {key: summary[key] for key in ("final_train_loss", "seconds", "step_s_median")}
        flags = [f"--adapter={run}"]
    measured = json.loads(ondevice("eval", str(bundle), valid, "--json", *flags))
    facts |= {key: measured[key] for key in ("loss", "exact", "rows")}
    return {**facts, "wall_s": time.time() - start}


def _is(identity: Settings, run: dict[str, Any]) -> bool:
    """Whether a run is that of these settings."""
    return identity.items() <= run.items() and ("steps" in run) == ("steps" in identity)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--sst2", type=Path, required=True, help="folder of train.tsv and dev.tsv")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--only", help="the set whose runs are wanted")
    given = parser.parse_args(argv)
    folders = write_sets(given.output, given.sst2)
    rows = {
        name: len((folder / "train.jsonl").read_text().splitlines())
        for name, folder in folders.items()
    }
    log = given.output / "runs.jsonl"
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    end = time.time() + 60 * given.minutes
    before: list[tuple[str, Settings]] = [(name, {}) for name in rows]
    for name, settings in [*wanted(rows), *before]:
        identity = {"bundle": given.bundle.name, "set": name, **settings}
        if given.only not in (None, name) or any(_is(identity, run) for run in known):
            continue
        if time.time() > end:
            break
        result = measure(given.bundle, name, folders[name], settings)
        known.append(result)
        with log.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
