"""A training example of a task, a prompt and its completion, and the JSONL file of many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ondevice.files import write_atomic


@dataclass(frozen=True)
class Example:
    """What the model sees, and what must follow (with its space)."""

    prompt: str
    completion: str


def write_jsonl(file: Path, examples: Sequence[Example]) -> Path:
    """Write examples as `{"prompt", "completion"}` lines, atomically; returns `file`."""
    write_atomic(file, "".join(f"{json.dumps(asdict(one))}\n" for one in examples).encode())
    return file
