"""Damaged runs: whatever lies in a run's folder is changed, and the run is resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from support.mutations import Rng, mutate_bytes, pick
from support.runs import train_arguments
from support.text_bundle import text_bundle

from fuzz.kind import Change, Kind, Read, alter, damage, ondevice, put_in_place, sha256, write
from fuzz.kinds.bundles import BUDGET, export

SAVED, STEPS = 3, 5
BUNDLE = "bundle"
EVALUATED = {"eval-data": "random:9", "eval-rows": 1, "eval-every": 1}


def _state(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        path = folder / f"saves/step-{SAVED:08d}/state.json"
        if not path.exists():  # not every run has saved
            return
        document = json.loads(path.read_bytes())
        change(document)
        path.write_text(json.dumps(document))

    return changed


def _lines(name: str, change: Callable[[list[str]], list[str]]) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        path = folder / name
        if path.exists():  # not every method logs its steps
            path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return changed


def _renamed(folder: Path, rng: Rng) -> None:
    for save in folder.glob(f"saves/step-{SAVED:08d}"):
        save.rename(save.with_name(f"step-{SAVED + 1:08d}"))


def _left_partials(folder: Path, rng: Rng) -> None:
    for path in (folder / "saves", folder):
        (path / ".step-00000009.partial").mkdir()
        (path / ".adapters.safetensors.partial").write_bytes(b"half")


class Saves(Kind):
    """Runs of both methods, on random rows and on text, that have two more steps to do.

    One keeps its best save, and one was killed before its first save.
    """

    name = "saves"
    originals = ("mebp", "mezo", "text", "best", "unsaved")
    known: ClassVar[dict[str, Change]] = {
        "another step": _state(lambda found: found.update(step=SAVED - 1)),
        "a step beyond the last": _state(lambda found: found.update(step=100)),
        "a step that is no integer": _state(lambda found: found.update(step=float(SAVED) + 0.5)),
        "a step of 5000 digits": write(
            f"saves/step-{SAVED:08d}/state.json", b'{"version": 3, "step": ' + b"9" * 5000 + b"}"
        ),
        "step 1e999": write(
            f"saves/step-{SAVED:08d}/state.json", b'{"version": 3, "step": 1e999, "files": {}}'
        ),
        "state nested beyond recursion": write(
            f"saves/step-{SAVED:08d}/state.json", b"[" * 100_000
        ),
        "save under another name": _renamed,
        "a line of metrics lost": _lines("metrics.jsonl", lambda lines: lines[1:]),
        "metrics not UTF-8": write("metrics.jsonl", b'{"step": 1, "x": "\xff"}\n' * SAVED),
        "metrics nested beyond recursion": write("metrics.jsonl", b"[" * 100_000 + b"\n"),
        "metrics of numbers without end": write(
            "metrics.jsonl", b'{"step": 1, "tokens": ' + b"9" * 5000 + b"}\n"
        ),
        "a line of the log lost": _lines("trajectory.jsonl", lambda lines: [lines[0], *lines[2:]]),
        "a digit of the log": _lines(
            "trajectory.jsonl", lambda lines: [*lines[:1], lines[1].replace("1", "2"), *lines[2:]]
        ),
        "evaluations nested beyond recursion": write("evaluations.json", b"[" * 100_000),
        "plan nested beyond recursion": write("plan.json", b"[" * 100_000),
        "plan with a number 1e999": write("plan.json", b'{"budget_bytes": 1e999}'),
        "settings nested beyond recursion": write(
            "config.toml", b"x = " + b"[" * 10_000 + b"]" * 10_000
        ),
        "settings not UTF-8": write("config.toml", b"\xff\xfe"),
        "partial files left": _left_partials,
        "saves are a file": lambda folder, rng: (
            shutil.rmtree(folder / "saves"),
            (folder / "saves").write_bytes(b""),
        )[1],
    }

    def prepare(self, folder: Path) -> None:
        export("random:tiny-qwen2", folder / BUNDLE)
        text_bundle(folder / "with-text", "{{ messages }}").path.rename(folder / "text-bundle")
        rows = [{"text": f"the {word} is there"} for word in ("sun", "rain", "snow", "wind")]
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs = {
            "mebp": (folder / BUNDLE, {"method": "mebp", **EVALUATED}),
            "mezo": (folder / BUNDLE, {"method": "mezo", **EVALUATED}),
            "text": (folder / "text-bundle", {"method": "mezo", "data": data}),
            "best": (folder / BUNDLE, {"method": "mezo", **EVALUATED}),
        }
        for name, (bundle, options) in runs.items():
            more = {**options, "budget": BUDGET, "max-seq-length": 16, "lr-schedule": "constant"}
            words = train_arguments(bundle, folder / name, SAVED, keep=2, **more)
            if code := ondevice(*words, "--keep-best" if name == "best" else "--no-keep-best"):
                raise RuntimeError(f"{name}: exit code {code}")
            (folder / name / "summary.json").unlink()  # as if it had been stopped here
        unsaved = Path(shutil.copytree(folder / "mebp", folder / "unsaved"))
        for path in (*unsaved.glob("saves/*"), *unsaved.glob("adapter*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def change(self, folder: Path, rng: Rng) -> object:
        path = pick(rng, sorted(path for path in folder.rglob("*") if path.is_file()))
        where = path.relative_to(folder)
        act = pick(rng, ["bytes", "bytes", "document", "line", "remove", "place", "swap"])
        if act == "document" and path.suffix == ".json":
            done = alter(path, rng)
        elif act == "line" and path.suffix == ".jsonl":
            lines = path.read_bytes().splitlines(keepends=True)
            at = int(rng.integers(len(lines)))
            if rng.random() < 0.5:
                done = "a line gone"
                del lines[at]
            else:
                lines[at], done = mutate_bytes(lines[at], rng)
            path.write_bytes(b"".join(lines))
        elif act == "remove":
            done = act
            path.unlink()
        elif act == "place":
            done = put_in_place(path, rng)
        elif act == "swap":
            other = pick(rng, sorted(path for path in folder.rglob("*") if path.is_file()))
            done = f"{act} for {other.relative_to(folder)}"
            path.write_bytes(other.read_bytes())
        else:
            done = damage(path, rng)
        return f"{where}: {done}"

    def read(self, folder: Path, original: Path) -> Read:
        code = ondevice("train", "--resume", folder, "--steps", STEPS)
        return Read(code, None if code else facts_of(folder), free=False)


def facts_of(run: Path) -> dict[str, Any]:
    """What a run has learnt and logged, without the seconds and bytes that differ each time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    log, evaluations = run / "trajectory.jsonl", run / "evaluations.json"
    return {
        "adapter": sha256(run / "adapters.safetensors"),
        "steps": [[line.get(name) for name in ("step", "loss", "learning_rate")] for line in lines],
        "log": sha256(log) if log.exists() else None,
        "evaluations": json.loads(evaluations.read_bytes()) if evaluations.exists() else None,
    }
