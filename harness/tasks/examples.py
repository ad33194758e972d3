"""Training examples of a task, each a prompt and its completion, and their JSONL file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.core.files import write_atomic


@dataclass(frozen=True)
class Example:
    """A prompt, and the completion that must follow (with its leading space)."""

    prompt: str
    completion: str


def write_jsonl(file: Path, examples: Sequence[Example]) -> Path:
    """Write examples as `{"prompt", "completion"}` lines, atomically; returns `file`."""
    write_atomic(file, "".join(f"{json.dumps(asdict(example))}\n" for example in examples).encode())
    return file
