"""Paths that are no text are refused by name, wherever a command takes one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.files import listing
from support.runs import here, refuses, succeeds, train_arguments

from ondevice.cli.main import main
from runtime.bundle.store import Bundle
from runtime.core.errors import UsageError
from runtime.core.paths import partial_folder, text_path

ODD = os.fsdecode(b"od\xffd")
NAMED = r"od\udcffd"  # as it is printed


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder whose name is not UTF-8."""
    try:
        (tmp_path / ODD).mkdir()
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    return tmp_path / ODD


def test_text_is_left_as_it_is(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd.parent)
    for name in ("bundle", "./bundle", "../é", "", "/", "x" * 300):
        assert text_path(name) == Path(name)
    for name in (ODD, f"{ODD}/bundle", "null\0byte"):
        with pytest.raises(UsageError, match="not valid UTF-8"):
            text_path(name)
    monkeypatch.chdir(odd)  # the name is text, its full name is not
    with pytest.raises(UsageError, match="rename"):
        text_path("bundle")
    (odd.parent / "link").symlink_to(odd)
    with pytest.raises(UsageError, match="rename"):
        text_path(odd.parent / "link")


def test_partial_folders_are_beside_and_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = tmp_path / ".bundle.partial"
    for name in ("bundle", "./bundle", "x/../bundle", tmp_path / "bundle", "bundle/."):
        assert partial_folder(Path(name)) == expected
    assert partial_folder(Path()) == tmp_path.parent / f".{tmp_path.name}.partial"


TRAIN = ["train", "BUNDLE", "--max-seq-length", "16", "--steps", "1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "random:tiny-llama", "--seq-lens", "16", "-o", "ODD/bundle"],
        ["export", "ODD", "--seq-lens", "16", "-o", "out"],
        ["inspect", "ODD"],
        ["trust", "ODD", "--yes"],
        ["data", "ODD/train.txt", "--bundle", "BUNDLE"],
        ["plan", "ODD"],
        [*TRAIN, "--data", "random:0", "--output", "ODD/run"],
        [*TRAIN, "--data", "ODD/train.txt", "--output", "out"],
        [*TRAIN, "--data", "random:0", "--eval-data", "ODD/train.txt", "--output", "out"],
        ["train", "--resume", "ODD"],
        ["eval", "BUNDLE", "--max-seq-length", "16", "--data", "ODD/train.txt"],
        ["eval", "BUNDLE", "--max-seq-length", "16", "--data", "random:0", "--adapter", "ODD"],
        ["generate", "ODD", "--prompt", "a"],
        ["generate", "BUNDLE", "--prompt", "NAME"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_commands_refuse_paths_that_are_no_text(
    origin: Bundle,
    tmp_path: Path,
    odd: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (odd / "train.txt").write_text("some text")
    (odd / "config.toml").write_text('bundle = "nowhere"\ndata = "random:0"\n')
    before = listing(tmp_path)
    places = {"BUNDLE": str(origin.path), "NAME": ODD, "ODD": str(odd)}
    places |= {f"ODD/{name}": f"{odd}/{name}" for name in ("bundle", "run", "train.txt")}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert NAMED in said and "not valid UTF-8" in said
    assert listing(tmp_path) == before


WRITING = {
    "train": "BUNDLE --data random:0 --steps 1",
    "export": "random:tiny-llama --seq-lens 16 --force",
    "compare": "BUNDLE --data random:0 --eval-data random:1 --steps 1",
    "report": "RUN",
}


@pytest.mark.parametrize("command", WRITING)
def test_outputs_are_no_link_to_nothing_and_lie_in_no_bundle(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle = shutil.copytree(origin.path, "bundle")
    Path("within").symlink_to("bundle")
    Path("link.html").symlink_to("nowhere")
    Path("gone").symlink_to("nowhere")
    before = listing(tmp_path)
    given = [str(bundle) if word == "BUNDLE" else word for word in WRITING[command].split()]
    words = [command, *given]
    refuses(2, "link.html is a link to nowhere, where nothing is", *words, "-o", "link.html")
    refuses(2, "gone is a link to nowhere, where nothing is", *words, "-o", "gone/a/b.html")
    for place in ("bundle/graphs/out.html", "within/out.html"):
        refuses(2, f"{place} lies in the bundle", *words, "-o", place)
    assert listing(tmp_path) == before


def test_a_page_is_written_where_a_link_leads(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    succeeds(*train_arguments(origin.path, tmp_path / "run", 1, max_seq_length=16), by=here)
    Path("page.html").write_text("the old one")
    Path("link.html").symlink_to("page.html")
    succeeds("report", "run", "-o", "link.html", by=here)
    assert Path("link.html").is_symlink() and "<html" in Path("page.html").read_text()
