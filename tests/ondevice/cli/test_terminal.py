"""On a real terminal, no command passes on the control characters of rows, tokens and names."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
from pathlib import Path

import pytest
from support.bundles import settings
from support.runs import COMMAND
from support.text_bundle import text_checkpoint

from export.bundle import export_bundle

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ ':' if add_generation_prompt else '' }}"
)
MOST_SECONDS = 120  # without a word, which is a failure
CONTROLS = [chr(code) for code in (*range(1, 9), *range(11, 28), 0x9B)]
OURS = re.compile(
    r"\x1b\[(?:2K\r|32m|0m|39m)|\r\n"
)  # progress, the colours of a row, ends of lines
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a random model, a quarter of whose tokens are control characters."""
    folder = tmp_path_factory.mktemp("terminal")
    source = text_checkpoint(folder / "model", TEMPLATE)
    file = source / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    for letter, control in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", CONTROLS, strict=True):
        words[control] = words.pop(letter)
    file.write_text(json.dumps(tokenizer))
    return export_bundle(settings(source, folder / "bundle", seq_lens=(16, 32))).path


def shown(*arguments: object, typed: str = "") -> str:
    """What a command writes on a terminal, without the sequences that are its own."""
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdin=other, stdout=other, stderr=other, close_fds=True
    )
    os.close(other)
    if typed:
        os.write(terminal, typed.encode())
    written = b""
    while select.select([terminal], [], [], MOST_SECONDS)[0]:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux's end of a terminal that nobody else has open
            break
        if not part:
            break
        written += part
    else:
        process.kill()
    os.close(terminal)
    assert process.wait() == 0, written
    return OURS.sub("", written.decode())


def test_data_shows_the_control_characters_of_rows(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "a", "completion": "b" + "".join(CONTROLS), "\x1b]0;x\x07": 1}
    file.write_text(json.dumps(row))
    text = shown("data", file, f"--bundle={bundle}")
    assert not CONTROL.findall(text), text
    assert "\\u001b" in text and "\\u0007" in text and "\\u009b" in text


def test_a_model_s_tokens_are_shown(bundle: Path) -> None:
    options = ("--max-tokens=16", "--temperature=1", "--seed=0")
    text = shown("generate", bundle, "--prompt=a", *options)
    assert not CONTROL.findall(text), text
    assert "\\u00" in text
    text = shown("chat", bundle, *options, typed="a\n/exit\n")
    assert not CONTROL.findall(text), text
    assert "\\u00" in text


def test_eval_shows_the_control_characters_of_labels_and_names(
    bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows\x1b[2J.jsonl"
    rows = [{"prompt": "a", "completion": one, "\x1b]0;x\x07": 1} for one in ("b\x9b", "c\x07")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = shown("eval", bundle, f"--data={file}", "--task=labels")
    assert not CONTROL.findall(text), text
    assert "\\u001b" in text, text
