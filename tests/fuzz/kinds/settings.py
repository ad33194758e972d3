"""What a user types or writes: TOML files of options, options, and machines in JSON."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import ClassVar

import msgspec
from support.mutations import JUNK, Rng, pick

from fuzz.kind import Change, Kind, Read, alter, damage, ondevice, put_in_place, write
from fuzz.kinds.bundles import BUDGET, export
from runtime.config.base import to_toml
from runtime.config.train import PlanConfig
from runtime.machine.machine import Blas, Heap, Machine

TOML, MACHINE = "options.toml", "machine.json"
BUNDLE = "bundle"
WORDS = (
    "0", "-1", "1e999", "nan", "inf", "9" * 30, "9" * 5000, "1e-999", "", " ", "\ud800", "x", "1,1",
    "[", "1_000", "0x10", "1.5.2", "\0", "99999999999999999999GB", "1e400MB", "٣",
)  # fmt: skip


def _set(key: str, value: str) -> Change:
    def changed(folder: Path, rng: Rng) -> None:
        _put(folder / TOML, key, value)

    return changed


def _put(path: Path, key: str, value: str) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
    path.write_text("\n".join([*lines, f"{key} = {value}"]) + "\n")


class Settings(Kind):
    """Plans for options and machines as a file holds them."""

    name = "settings"
    known: ClassVar[dict[str, Change]] = {
        "nested beyond recursion": write(TOML, b"x = " + b"[" * 100_000),
        "tables nested beyond recursion": write(TOML, b"[" + b"a." * 50_000 + b"a]\n"),
        "not UTF-8": write(TOML, b"\xff\xfe"),
        "machine nested beyond recursion": write(MACHINE, b"[" * 100_000),
        "machine with 1e999": write(MACHINE, b'{"measured_machine": {"process_bytes": 1e999}}'),
        "rate of infinity": _set("learning_rate", "1e999"),
        "batch of 10**18": _set("batch_size", str(10**18)),
        "accumulation of 10**18": _set("grad_accumulation", str(10**18)),
        "queries of 10**18": _set("queries", str(10**18)),
        "number of 5000 digits": _set("steps", "9" * 5000),
        "budget of 5000 digits": _set("budget", '"' + "9" * 5000 + 'GB"'),
        "budget 1e999": _set("budget", '"1e999GB"'),
        "length of 10**18": _set("max_seq_length", str(10**18)),
        "rank of 10**18": _set("lora_rank", str(10**18)),
        "epsilon of nothing": _set("epsilon", "1e-320"),
    }

    def prepare(self, folder: Path) -> None:
        export("random:tiny-qwen2", folder / BUNDLE)
        (folder / "original").mkdir()
        machine = Machine("cpu", "unpacked", "glibc", 60_000_000, Blas(), Heap())
        described = {"measured_machine": msgspec.to_builtins(machine)}
        (folder / "original" / MACHINE).write_text(json.dumps(described))
        config = PlanConfig(bundle=str(folder / BUNDLE), budget=BUDGET, machine=MACHINE)
        (folder / "original" / TOML).write_text(to_toml(config))

    def change(self, folder: Path, rng: Rng) -> object:
        toml, machine = folder / TOML, folder / MACHINE
        act = pick(rng, ["value", "value", "word", "word", "bytes", "machine", "place"])
        if act == "place":
            return put_in_place(pick(rng, (toml, machine)), rng)
        if act == "machine":
            return f"{MACHINE}: {alter(machine, rng)}"
        if act == "bytes":
            return f"{TOML}: {damage(toml, rng)}"
        key = pick(rng, [key for key in tomllib.loads(toml.read_text()) if key != "bundle"])
        value = json.dumps(pick(rng, JUNK if act == "value" else WORDS), ensure_ascii=True)
        if act == "word" and rng.random() < 0.5:
            value = value[1:-1]  # a number, where it is one
        _put(toml, key, value)
        return f"{key} = {value[:80]}"

    def read(self, folder: Path, original: Path) -> Read:
        return Read(ondevice("plan", "--config", folder / TOML, "--machine", folder / MACHINE))
