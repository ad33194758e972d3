"""The README's way from a user's data to other programs, on a tiny model.

The commands are those of the README, in its order. Only sizes are added to them, and
`--skip-bad-rows`, since two of the rows are bad.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from support.logits import engine_logits, mlx_lm_logits
from support.models import relative
from support.pages import README, lines_of, scripts, section, words_of
from support.runs import NO_OTHERS, ondevice, succeeds
from support.shared import Shared
from support.text_bundle import text_checkpoint

from runtime.bundle.store import Bundle
from runtime.methods.adapters import Adapters
from runtime.run.lora import to_apply
from runtime.run.session import open_checked

TEMPLATE = """\
{% for tool in tools or [] %}tool {{ tool.function.name }}
{% endfor %}
{% for m in messages %}
{{ m.role }}: {{ m.content or '' }}
{% for call in m.tool_calls or [] %}call {{ call.function.name }}{% endfor %}
{{ eos_token if m.role == 'assistant' }}
{% endfor %}
{{ 'assistant: ' if add_generation_prompt }}"""
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
LAMP = {"type": "function", "function": {"name": "lamp", "arguments": {"set": "on"}}}


def conversation(number: int) -> dict[str, object]:
    """Two turns with a tool call between them; every other one has a list of tools."""
    question, answer = f"lamp {number}?", "on" if number % 2 else "off"
    return {
        "tools": [CLOCK] if number % 4 > 1 else [],
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "tool_calls": [LAMP]},
            {"role": "tool", "name": "lamp", "content": "ok"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "no"},
        ],
    }


BAD = ('{"messages": 5}', "no JSON")
SMALL = {
    "export": ("--seq-lens", "128", "--calibration-tokens", "512", "--skip-bad-rows"),
    "data": ("--skip-bad-rows",),
    "train": ("--steps", "60", "--learning-rate", "1e-2", "--skip-bad-rows", NO_OTHERS),
    "chat": ("--max-tokens", "16"),
    "fuse": ("--dtype", "float32"),
}
TOKENS = 24


@pytest.fixture(scope="module")
def way(shared: Shared) -> Path:
    """A folder in which every command of the README's script has ended well."""

    def make(path: Path) -> None:
        path.mkdir()
        text_checkpoint(path / "my-model", TEMPLATE)
        rows = [json.dumps(conversation(number)) for number in range(24)]
        (path / "chats.jsonl").write_text("\n".join([*rows, *BAD]) + "\n")
        (script,) = scripts(section(README, "From your data to use"))
        said = {}
        for line in lines_of(script):
            words = words_of(line)
            small = () if "--resume" in words else SMALL.get(words[0], ())
            if words[0] == "chat":
                done = ondevice(*words, *small, cwd=path, input="lamp 3?\n/exit\n")
            else:
                with contextlib.chdir(path):
                    done = ondevice(*words, *small)
            assert done.returncode == 0, (line, done.stderr)
            said[" ".join(words[:2])] = [done.stdout, done.stderr]
        (path / "said.json").write_text(json.dumps(said))

    return shared("a newcomer's way", make)


def test_what_was_read_and_written(way: Path) -> None:
    said = json.loads((way / "said.json").read_text())
    shown = said["data chats.jsonl"][0]
    assert "26 rows read" in shown and "2 skipped" in shown
    assert "chats.jsonl, line 25" in shown and "chats.jsonl, line 26" in shown
    assert said["chat bundle"][0].strip() == "call lamp", said["chat bundle"]
    summary = json.loads((way / "run" / "summary.json").read_text())
    parts = summary["data"].values()  # the held-out part is read by itself
    assert summary["steps"] == 60 and sum(part["skipped"] for part in parts) == len(BAD)
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"]
    assert (way / "report.html").stat().st_size > 1000


@pytest.fixture(scope="module")
def bundle(way: Path) -> Bundle:
    return open_checked(str(way / "bundle"))


@pytest.fixture(scope="module")
def tokens(bundle: Bundle) -> list[int]:
    return list(map(int, np.arange(TOKENS) * 7 % bundle.manifest.vocab_size))


@pytest.fixture(scope="module")
def ours(way: Path, bundle: Bundle, tokens: list[int]) -> np.ndarray:
    """Logits (T, V) of the bundle with the run's adapter."""
    adapted = to_apply(way / "run", bundle)
    adapters = Adapters.applied(adapted.manifest, way / "run")
    return engine_logits(adapted, adapters, np.array(tokens))


@pytest.fixture(scope="module")
def plain(way: Path, shared: Shared) -> Path:
    """The bundle's own values as a checkpoint, to which an adapter written for others is added."""

    def make(path: Path) -> None:
        succeeds("fuse", way / "bundle", "-o", path, "--dtype", "float32")

    return shared("a newcomer's plain checkpoint", make)


def test_the_fused_model_has_the_same_logits(
    way: Path, plain: Path, ours: np.ndarray, tokens: list[int]
) -> None:
    fused = mlx_lm_logits(way / "my-fused-model", np.array(tokens))
    unadapted = mlx_lm_logits(plain, np.array(tokens))
    assert relative(fused, ours) <= 1e-4 < relative(unadapted, ours)
