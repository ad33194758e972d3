"""Adapters from elsewhere: the tensors, their configuration, and the files themselves."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from support.mutations import Rng, pick
from support.runs import train_arguments

from fuzz.kind import Change, Kind, Read, alter, damage, ondevice, put_in_place, strict_json
from fuzz.kinds.bundles import BUDGET, export, facts_of
from fuzz.kinds.checkpoints import tensors_start
from runtime.adapters import peft
from runtime.adapters.mlx_lm import CONFIG, WEIGHTS

FORMS = {"from-peft": "peft", "from-mlx": "mlx"}  # of other tools, which are evaluated


def _weights(folder: Path) -> Path:
    """The tensors of an adapter: PEFT's, or ours and mlx-lm's."""
    theirs = folder / peft.WEIGHTS
    return theirs if theirs.exists() else folder / WEIGHTS


def _values(value: float) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        path = _weights(folder)
        data = path.read_bytes()
        start = tensors_start(data)
        values = np.full((len(data) - start) // 4, value, "<f4")
        path.write_bytes(data[:start] + values.tobytes())

    return changed


def _config(change: Callable[[str], str]) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        path = folder / CONFIG
        path.write_text(change(path.read_text()))

    return changed


class Adapters(Kind):
    """Adapters that are evaluated, or trained further."""

    name = "adapters"
    originals = ("evaluated", "trained", *FORMS)
    known: ClassVar[dict[str, Change]] = {
        "not a number": _values(float("nan")),
        "infinite": _values(float("inf")),
        "huge": _values(3e38),
        "tiny": _values(1e-45),
        "nested beyond recursion": _config(lambda text: "[" * 100_000 + text),
        "alpha 1e999": _config(lambda text: text.replace('"alpha": 16.0', '"alpha": 1e999')),
        "scale 1e999": _config(lambda text: text.replace('"scale": 2.0', '"scale": 1e999')),
        "huge rank": _config(lambda text: text.replace('"rank": 8', '"rank": 1000000000')),
        "PEFT's alpha 1e999": _config(
            lambda text: text.replace('"lora_alpha": 16', '"lora_alpha": 1e999')
        ),
        "PEFT's huge rank": _config(lambda text: text.replace('"r": 8', '"r": 1000000000')),
        "rank of 5000 digits": _config(
            lambda text: text.replace('"rank": 8', '"rank": ' + "9" * 5000)
        ),
        "no configuration": lambda folder, rng: (folder / CONFIG).unlink(),
        "huge header": lambda folder, rng: _weights(folder).write_bytes(
            struct.pack("<Q", 1 << 62) + b"{}"
        ),
    }

    def prepare(self, folder: Path) -> None:
        export("random:tiny-qwen2", folder / "bundle")
        arguments = train_arguments(folder / "bundle", folder / "run", 2, budget=BUDGET)
        if code := ondevice(*arguments):
            raise RuntimeError(f"exit code {code}")
        for original, form in FORMS.items():
            words = ("adapter", folder / "run", "--to", form, "-o", folder / original)
            if code := ondevice(*words):
                raise RuntimeError(f"exit code {code}")
        for original in ("evaluated", "trained"):
            (folder / original).mkdir()
            for name in (WEIGHTS, CONFIG):
                shutil.copyfile(folder / "run" / name, folder / original / name)

    def change(self, folder: Path, rng: Rng) -> object:
        weights, config = _weights(folder), folder / CONFIG
        act = pick(rng, ["header", "header", "values", "config", "config", "place"])
        if act == "place":
            return put_in_place(pick(rng, (weights, config)), rng)
        if act == "config":
            change = damage if rng.random() < 0.2 else alter
            return f"{CONFIG}: {change(config, rng)}"
        upto = tensors_start(weights.read_bytes()) if act == "header" else None
        return f"{weights.name}: {damage(weights, rng, upto)}"

    def read(self, folder: Path, original: Path) -> Read:
        bundle = original.parent / "bundle"
        if original.name == "trained":
            run = Path("run").absolute()
            arguments = train_arguments(bundle, run, 2, budget=BUDGET, adapter=folder)
            code = ondevice(*arguments)
            return Read(code, None if code else facts_of(run))
        given: dict[str, Any] = {"data": "random:7", "max-seq-length": 16, "adapter": folder}
        options = [f"--{name}={value}" for name, value in given.items()]
        output = Path("said").absolute()
        start = output.stat().st_size
        code = ondevice("eval", bundle, *options, "--budget", BUDGET, "--json")
        if code:
            return Read(code)
        # what was printed is JSON to every reader, so a loss that is no number cannot be shown
        printed = output.read_bytes()[start:].splitlines()
        line = next(line for line in printed if line.startswith(b"{"))
        Path("result.json").write_bytes(line)
        return Read(code, strict_json(Path("result.json"))["loss"])
