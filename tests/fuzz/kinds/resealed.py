"""Damaged runs whose checksums were made right: what they say is checked by its meaning."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

from support.mutations import Rng, mutate, pick

from fuzz.kind import Change, Read, sha256
from fuzz.kinds.saves import Saves
from runtime.storage.checksums import Checksums

VALUES = ("0", "-1", "3", "1e30", "nan", '"x"', "true", "9223372036854775807", "[]")
OF_RUN = ("plan.json", "evaluations.json")
OF_SAVE = ("method.bin", "adapter_config.json")
LOGS = ("metrics.jsonl", "trajectory.jsonl")


class Resealed(Saves):
    """The same runs; another result is right, because they say something else."""

    name = "resealed"
    made_by = "saves"
    known: ClassVar[dict[str, Change]] = {}

    def change(self, folder: Path, rng: Rng) -> object:
        name = pick(rng, ["config.toml", "checksums.json", *OF_RUN, "state.json", *OF_SAVE, *LOGS])
        saves = sorted((folder / "saves").iterdir())
        if name == "config.toml":
            done = _setting(folder / name, rng)
            Checksums(folder).record(name)
        elif name == "checksums.json":
            done = _document(folder / name, rng)
        elif name in OF_RUN:
            if not (folder / name).exists():
                return "nothing"
            done = _document(folder / name, rng)
            Checksums(folder).record(name)
        elif not saves or (name in LOGS and not (folder / name).exists()):
            return "nothing"
        else:
            done = _of_save(folder, saves[-1] / "state.json", name, rng)
        return f"{name}: {done}"

    def read(self, folder: Path, original: Path) -> Read:
        found = super().read(folder, original)
        return Read(found.code, found.facts, free=True)


def _of_save(folder: Path, state: Path, name: str, rng: Rng) -> str:
    """Change a file that the state.json of a save has the checksum of, or that itself."""
    document = json.loads(state.read_bytes())
    if name == "state.json":
        done = mutate(document, rng)
    elif name in LOGS:
        done = _line(folder / name, rng)
        nbytes = (folder / name).stat().st_size
        document["logs"][name] = {"nbytes": nbytes, "sha256": sha256(folder / name)}
    else:
        done = _document(state.with_name(name), rng)
        document["files"][name] = sha256(state.with_name(name))
    state.write_bytes(_sealed(document))
    return done


def _sealed(document: Any) -> bytes:
    """A state.json with the checksum of itself, as far as it has a place for it."""

    def text(**more: str) -> bytes:
        whole = json.dumps({**document, **more}, separators=(",", ":"), ensure_ascii=False)
        return whole.encode("utf-8", "surrogatepass")

    if not isinstance(document, dict) or "sha256" not in document:
        return json.dumps(document).encode()
    return text(sha256=hashlib.sha256(text(sha256="")).hexdigest()) + b"\n"


def _document(path: Path, rng: Rng) -> str:
    """Change a JSON file, or cut another."""
    data = path.read_bytes()
    try:
        document = json.loads(data)
    except ValueError:
        path.write_bytes(data[: int(rng.integers(len(data)))])
        return "cut"
    done = mutate(document, rng)
    path.write_text(json.dumps(document))
    return done


def _line(path: Path, rng: Rng) -> str:
    """Change a line of JSON."""
    lines = path.read_text().splitlines(keepends=True)
    at = int(rng.integers(len(lines)))
    document = json.loads(lines[at])
    done = mutate(document, rng)
    lines[at] = json.dumps(document) + "\n"
    path.write_text("".join(lines))
    return f"line {at + 1}: {done}"


def _setting(path: Path, rng: Rng) -> str:
    """Give a setting another value."""
    lines = path.read_text().splitlines(keepends=True)
    at = int(rng.integers(len(lines)))
    lines[at] = f"{lines[at].partition('=')[0]}= {pick(rng, VALUES)}\n"
    path.write_text("".join(lines))
    return lines[at]
